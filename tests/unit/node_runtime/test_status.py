"""A node's counters after a few requests, by the names under which /metrics shows them."""

from dataclasses import replace

import pytest

from headrace.cache.hits import ReceiveState
from headrace.engine.build import build_engine
from headrace.speculation.config import SpeculationConfig
from headrace.step_costs import PROMPT_SECONDS, StepShape
from node_runtime.status import cache_counters, node_status
from router.node_counters import TEXTS
from tests.support.cache.cache_node import FakeNode
from tests.support.engine.driving import GREEDY, SMALL, generate, request, small_engine


def counters(node: FakeNode) -> dict[str, float]:
    return {name: value for name, value in cache_counters(node.cache.stats().totals).items() if value}


def test_prefills_that_share_a_start_count_per_group() -> None:
    node = FakeNode(policy="align")
    node.serve(range(48))
    assert counters(node) == {
        "attention/lookups": 1, "attention/looked_up_tokens": 47,
        "state/lookups": 1, "state/looked_up_tokens": 47,
        "checkpoints_published": 1,  # at 48
    }  # fmt: skip
    # 32 tokens in common, no checkpoint there: tombstones, and a branch point.
    node.serve([*range(32), *range(100, 120)])
    assert counters(node) == {
        "attention/lookups": 2, "attention/looked_up_tokens": 47 + 51, "attention/hit_tokens": 32,
        "state/lookups": 2, "state/looked_up_tokens": 47 + 51,
        "tombstone_tokens": 32, "branch_points": 1,
        "checkpoints_published": 3,  # at 32 and at 48
    }  # fmt: skip
    # The third sharer resumes there; so does a fourth.
    for first in (200, 300):
        node.serve([*range(32), *range(first, first + 20)])
    assert counters(node) == {
        "attention/lookups": 4, "attention/looked_up_tokens": 47 + 3 * 51, "attention/hit_tokens": 3 * 32,
        "state/lookups": 4, "state/looked_up_tokens": 47 + 3 * 51, "state/hit_tokens": 2 * 32,
        "resumable_tokens": 2 * 32, "reused_tokens": 2 * 32,
        "tombstone_tokens": 32, "branch_points": 1,
        "checkpoints_published": 5, "checkpoints_used": 1,
    }  # fmt: skip
    stats = node.cache.stats()
    assert (stats.num_indexed_blocks, stats.num_checkpoints) == (3 + 3, 5)


def test_a_state_that_arrives_is_neither_hit_nor_miss_of_the_state_group() -> None:
    node = FakeNode()
    for _ in range(2):
        request = node.admit(range(65), hit_policy=ReceiveState())
        assert request is not None
        node.receive(request)
        node.finish(request)
    assert counters(node) == {
        "attention/lookups": 2, "attention/looked_up_tokens": 130, "attention/hit_tokens": 64, "reused_tokens": 64,
    }  # fmt: skip


def test_evictions_count_per_group_and_unused_checkpoints_apart() -> None:
    node = FakeNode(policy="every", num_blocks=4, num_slots=6)
    node.serve(range(48))  # three blocks, checkpoints at 16, 32, 48
    node.serve(range(33))  # resumes at 32
    node.serve(range(100, 164))  # needs all blocks
    assert {name: value for name, value in counters(node).items() if "evict" in name or "checkpoint" in name} == {
        "attention/evictions": 3, "state/evictions": 3,
        "checkpoints_published": 7, "checkpoints_used": 1, "checkpoints_evicted_unused": 2,
    }  # fmt: skip


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_node_reports_what_it_drafted_and_how_much_of_it_was_right(drafter: str, tiny_checkpoint) -> None:
    built = small_engine(tiny_checkpoint("granite"), speculation=SpeculationConfig(drafter, "fixed", 2))
    generate(built, request([5, 6, 7], replace(GREEDY, max_tokens=12, bias_ids=(7,), bias_values=(50.0,))))
    counted = node_status(built).counters
    assert counted["sampled_tokens"] == 12
    # Three tokens come alone, and the others three a step: each step's second and third are accepted drafts.
    assert counted["drafted_tokens"] == counted["accepted_tokens"] == (6 if drafter == "ngram" else 0)
    checked, accepted = (
        [counted.get(f"position={place}/drafts_{name}") for place in ("1", "2", "3")]
        for name in ("checked", "accepted")
    )
    assert checked == accepted == ([3, 3, 0] if drafter == "ngram" else [None] * 3)
    assert (counted["drafting_seconds"] > 0) == (drafter == "ngram")
    assert counted["draft_steps"] == (3 if drafter == "ngram" else 0) and counted["draft_steps_followed"] == 0
    assert {name.rpartition("/")[2] for name in counted if "draft" in name} | {"accepted_tokens"} <= TEXTS.keys()


def test_the_work_on_prompts_is_counted_by_the_nodes_costs_and_that_on_answers_is_not(tiny_checkpoint) -> None:
    built = build_engine(str(tiny_checkpoint("granite")), SMALL, lambda: 0.0)  # no step takes time: no cost is fitted
    for number, max_tokens in enumerate((1, 12), 1):
        prompt = [number] * 40
        generate(built, request(prompt, replace(GREEDY, max_tokens=max_tokens)))
        of_each_s = built.engine.cost_fit.costs.prompt_work_s(StepShape.prefill(0, len(prompt)))
        assert node_status(built).counters[PROMPT_SECONDS] == pytest.approx(number * of_each_s)
