"""A start that waits for resources: what ends it, and what it logs."""

import pytest

from deploy.errors import StartFailed
from deploy.resource_watch import NOTE_AFTER_S, ResourceWatch
from deploy.resources import Demand, Host

P0, D0 = Demand("p0", {"CPU": 1}), Demand("d0", {"CPU": 1, "GPU": 1})
CPU_HOST = Host("a", "10.0.0.1", {"CPU": 4}, {"CPU": 3})
GPU_HOST = Host("b", "10.0.0.2", {"CPU": 4, "GPU": 1}, {"CPU": 4, "GPU": 1})
TAKEN_HOST = Host("b", "10.0.0.2", {"CPU": 4, "GPU": 1}, {"CPU": 4})
BOTH = {"p0", "d0"}


def test_what_no_host_can_hold_ends_the_start_at_once_with_what_is_missing():
    watch = ResourceWatch([P0, D0], start_s=100.0, join_timeout_s=0.0)
    with pytest.raises(StartFailed) as failure:
        watch.look([CPU_HOST], BOTH, 100.0)
    assert str(failure.value).splitlines() == [
        "Ray cannot hold this cluster:",
        "d0 asks for 1 CPU, 1 GPU: no host has that",
        "Ray has, on 1 host: 4 CPU (3 free)",
        "  10.0.0.1: 4 CPU (3 free)",
        "Ask for less in `placement`, start Ray with more, or set ray.join_timeout_s if hosts join later.",
    ]


def test_hosts_may_join_until_the_join_timeout_and_one_note_says_what_is_missing():
    watch = ResourceWatch([P0, D0], start_s=100.0, join_timeout_s=60.0)
    assert watch.look([CPU_HOST], BOTH, 100.0) is None
    note = watch.look([CPU_HOST], BOTH, 100.0 + NOTE_AFTER_S)
    assert note.startswith("waiting for resources: d0 asks for 1 CPU, 1 GPU: no host has that\nRay has, on 1 host")
    assert watch.look([CPU_HOST], BOTH, 120.0) is None
    assert watch.look([CPU_HOST, GPU_HOST], set(), 130.0) is None  # it has joined
    with pytest.raises(StartFailed):
        watch.look([CPU_HOST], {"d0"}, 160.0)


def test_an_actor_waits_for_what_others_hold_and_the_note_names_it():
    watch = ResourceWatch([P0, D0], start_s=0.0, join_timeout_s=0.0)
    note = watch.look([TAKEN_HOST], BOTH, NOTE_AFTER_S)
    assert note.splitlines()[0] == "waiting for resources: d0 asks for 1 CPU, 1 GPU"
    assert watch.late([TAKEN_HOST], BOTH, ["p0", "d0"]).splitlines() == [
        "not ready in time: p0, d0",
        "d0 asks for 1 CPU, 1 GPU, and waits for it",
        "Ray has, on 1 host: 4 CPU (4 free), 1 GPU (0 free)",
        "  10.0.0.2: 4 CPU (4 free), 1 GPU (0 free)",
        "Ask for less in `placement`, or free what others hold.",
    ]


def test_a_placed_actor_that_holds_its_resources_only_takes_long():
    watch = ResourceWatch([P0, D0], start_s=0.0, join_timeout_s=0.0)
    assert watch.look([TAKEN_HOST], set(), 60.0) is None
    late = watch.late([TAKEN_HOST], set(), ["d0"])
    assert late == "not ready in time: d0; raise ray.start_timeout_s if they only take long"
