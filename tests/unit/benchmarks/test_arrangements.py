"""Arrangements of devices, with drafts and without."""

import pytest
import typer

from benchmarks.cluster.arrangements import LOADS, Row, Sampled, Work, sized, works
from benchmarks.cluster.kinds import KINDS, Caches, Chunks, Contender, clusters_of

DEVICES = ("cuda:0", "cuda:1")


@pytest.mark.parametrize("kind", KINDS)
def test_all_nodes_of_an_arrangement_draft_or_none(kind: str) -> None:
    for num_drafts, expected in ((0, None), (3, {"drafter": "mtp", "max_drafts": 3, "count": "auto"})):
        clusters = clusters_of(Contender(kind, num_drafts), DEVICES, Caches(1.0, 0.25), Chunks(4096, 2048))
        engines = [settings["engine"] for nodes in clusters for _, settings in nodes.values()]
        assert [engine["device"] for engine in engines] == [*DEVICES]
        assert [engine.get("speculation") for engine in engines] == [expected] * 2
        assert [engine["state_share"] for engine in engines] == [0.25] * 2


def test_four_devices_are_one_cluster_of_two_nodes_a_role_or_four_of_one_node() -> None:
    roles = {
        kind: [
            [role for role, _ in nodes.values()]
            for nodes in clusters_of(Contender(kind, 0), ["cpu"] * 4, Caches(1.0, None), Chunks(4096, 2048))
        ]
        for kind in KINDS
    }
    divided = [["prefill", "decode", "prefill", "decode"]]
    assert roles == {"undivided": [["both"]] * 4, "fixed": divided, "elastic": divided}


@pytest.mark.parametrize("num_devices", [0, 3])
def test_devices_that_leave_one_without_its_other_role_are_refused(num_devices: int) -> None:
    with pytest.raises(typer.BadParameter, match=f"{num_devices} nodes"):
        KINDS["elastic"].clusters(num_devices)


def test_a_row_says_that_its_drafts_are_pinned_and_compares_the_same_arrangement_without() -> None:
    name = Contender("elastic", 3).name
    row = Row("48 chats", 0.012, name, 30.0, 25.0, 20.0, 2.9, 0.8, (1.0, 2.0), (0.1, 0.2), (0.01, 0.02, 0.03))
    assert str(row).startswith("| 48 chats | 12 ms / any | elastic, 3 drafts pinned | 30.00 | 1.20 | 1.50 | 2.90 |")


def test_a_row_says_what_later_turns_asked_for() -> None:
    times = (1.0, 2.0), (0.1, 0.2), (0.01, 0.02, 0.03)
    row = Row("48 chats", None, "elastic", 30.0, 25.0, None, 1.0, 0.8, *times, later_first_token_s=0.3)
    assert str(row).startswith("| 48 chats | any / 300 ms | elastic | 30.00 |")


def test_works_ask_for_the_first_token_of_later_turns() -> None:
    (work,) = works("48 chats:10", [], None)
    assert work.chats.later_first_token_s is None and work.asking(0.0) == work
    assert work.asking(300.0).chats.later_first_token_s == 0.3


def test_each_step_of_a_sequence_gives_a_token_and_its_accepted_drafts() -> None:
    assert Sampled(1339, 539).tokens_a_step(Sampled(1000, 300)) == pytest.approx(3.39)


def test_a_number_of_chats_replaces_that_of_the_load() -> None:
    assert sized(LOADS["48 chats"], 1, 168).total == 168
    assert sized(LOADS["48 chats"], 16, None).total == 15


def test_a_load_may_have_a_gap_and_a_number_of_chats_of_its_own() -> None:
    chats = LOADS["short turns"]
    assert works("short turns", [10.0, 0.0], None) == [Work("short turns", chats, gap) for gap in (0.01, None)]
    assert works("short turns:0", [10.0], 300) == [Work("short turns", sized(chats, 1, 300), None)]
    assert works("short turns:12:240", [10.0], 300) == [Work("short turns", sized(chats, 1, 240), 0.012)]


@pytest.mark.parametrize("load", ["48", "48 chats:ten", "48 chats:10:many", "48 chats:10:300:1"])
def test_a_load_that_does_not_exist_is_refused_by_name(load: str) -> None:
    with pytest.raises(typer.BadParameter, match=load):
        works(load, [10.0], None)
