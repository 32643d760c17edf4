"""Arrangements of two devices, with drafts and without."""

import pytest

from benchmarks.cluster.arrangements import LOADS, Row, Sampled, sized
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


def test_a_row_says_that_its_drafts_are_pinned_and_compares_the_same_arrangement_without() -> None:
    name = Contender("elastic", 3).name
    row = Row("48 chats", 0.012, name, 30.0, 25.0, 20.0, 2.9, 0.8, (1.0, 2.0), (0.1, 0.2), (0.01, 0.02, 0.03))
    assert str(row).startswith("| 48 chats | 12 ms | elastic, 3 drafts pinned | 30.00 | 1.20 | 1.50 | 2.90 |")


def test_each_step_of_a_sequence_gives_a_token_and_its_accepted_drafts() -> None:
    assert Sampled(1339, 539).tokens_a_step(Sampled(1000, 300)) == pytest.approx(3.39)


def test_a_number_of_chats_replaces_that_of_the_load() -> None:
    assert sized(LOADS["48 chats"], 1, 168).total == 168
    assert sized(LOADS["48 chats"], 16, None).total == 15
