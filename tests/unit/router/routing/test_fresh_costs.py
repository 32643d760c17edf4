"""A node whose steps once took long is tried again, as one like those that work."""

from dataclasses import replace

import pytest

from headrace.step_costs import PROMPT_SECONDS, StepCosts
from headrace.wire.node_messages import Role
from router.routing.fresh_costs import PASSED_OVER_S, FreshCosts
from tests.support.router.fake_nodes import node_info, node_status

SOUND = StepCosts()
SLOW = StepCosts(step_s=0.05, decode_s=0.001, token_s=0.02)
BEAT_S = 0.5


class Nodes:
    """Two nodes that report in turn, every BEAT_S: `a` with sound costs, `b` with slow ones."""

    def __init__(self, device_of_b: str = "cuda") -> None:
        self.fresh = FreshCosts()
        self.counts_of_b = True
        self._now_s = 0.0
        self._counters = {name: {"sampled_tokens": 0.0, PROMPT_SECONDS: 0.0} for name in "ab"}
        self._devices = {"a": "cuda", "b": device_of_b}
        self._beat("")

    def after(self, seconds: float, at_work: str, *, does: str = "sampled_tokens", incarnation: int = 1) -> StepCosts:
        """The costs to reckon with of `b`, once the nodes at work have worked for so long."""
        for _ in range(round(seconds / BEAT_S)):
            costs = self._beat(at_work, does, incarnation)
        return costs

    def _beat(self, at_work: str, does: str = "sampled_tokens", incarnation: int = 1) -> StepCosts:
        self._now_s += BEAT_S
        for name, own in (("a", SOUND), ("b", SLOW)):
            self._counters[name][does] += name in at_work
            info = node_info(name, Role.BOTH, device=self._devices[name], incarnation=incarnation)
            counters = dict(self._counters[name]) if name == "a" or self.counts_of_b else {}
            status = replace(node_status(), costs=own, counters=counters)
            costs = self.fresh.heartbeat(info, status, self._now_s)
        return costs


def test_a_node_that_generates_nothing_while_another_does_is_taken_to_decode_like_that_one() -> None:
    nodes = Nodes()
    assert nodes.after(PASSED_OVER_S - BEAT_S, "a") == SLOW
    assert nodes.after(BEAT_S, "a") == replace(SLOW, step_s=SOUND.step_s, decode_s=SOUND.decode_s)
    assert nodes.after(BEAT_S, "ab") == SLOW, "it works again, and says itself what it takes"
    assert nodes.after(PASSED_OVER_S - BEAT_S, "a") == SLOW


def test_a_node_that_computes_no_prompts_while_another_does_is_taken_to_compute_them_like_that_one() -> None:
    assert Nodes().after(PASSED_OVER_S, "a", does=PROMPT_SECONDS) == replace(SLOW, token_s=SOUND.token_s)


@pytest.mark.parametrize("at_work", ["", "b", "ab"])
def test_a_node_that_works_or_has_no_other_beside_it_that_does_keeps_its_costs(at_work: str) -> None:
    nodes = Nodes()
    nodes.after(BEAT_S, "a")
    assert nodes.after(3 * PASSED_OVER_S, at_work) == SLOW


def test_a_node_of_a_release_that_does_not_count_such_work_keeps_its_costs() -> None:
    nodes = Nodes()
    nodes.counts_of_b = False
    assert nodes.after(2 * PASSED_OVER_S, "a") == SLOW


def test_nodes_on_another_kind_of_device_say_nothing() -> None:
    assert Nodes(device_of_b="cpu").after(2 * PASSED_OVER_S, "a") == SLOW


def test_a_restarted_node_and_those_that_are_gone_count_no_more() -> None:
    nodes = Nodes()
    assert nodes.after(PASSED_OVER_S, "a") != SLOW
    assert nodes.after(BEAT_S, "a", incarnation=2) == SLOW
    nodes.fresh.keep(["b"])
    assert nodes.after(2 * PASSED_OVER_S, "") == SLOW
