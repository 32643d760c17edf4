"""The stages of ended requests, by the times of their lives."""

from http import HTTPStatus

import pytest

from headrace.request import Request, Sampling
from headrace.token_array import TokenArray
from router.errors import ApiError
from router.requests.events import GaveUp
from router.requests.lifecycle import RequestLifecycle
from router.requests.stages import outcome_of, stages_of
from router.requests.states import RequestPhase as Phase

REQUEST = Request("r", TokenArray.of((1, 2)), 2, Sampling(max_tokens=9, seed=1))
REMOTE = {Phase.QUEUED: 1, Phase.RESERVED: 2, Phase.PREFILLING: 3, Phase.MOVING: 5, Phase.DECODING: 6, Phase.DONE: 9}


def life_with(entered: dict[Phase, float]) -> RequestLifecycle:
    life = RequestLifecycle(REQUEST, max_attempts=1, now_s=0.0)
    life.entered_s = entered
    return life


@pytest.mark.parametrize(
    ("entered", "stages"),
    [
        (REMOTE, {"queue": (1, 3), "prefill": (3, 5), "hand_over": (5, 6), "decode": (6, 9)}),
        ({Phase.QUEUED: 1, Phase.PREFILLING: 2, Phase.DECODING: 4, Phase.DONE: 9},
         {"queue": (1, 2), "prefill": (2, 4), "decode": (4, 9)}),
        ({Phase.QUEUED: 1, Phase.PREFILLING: 2, Phase.DONE: 4}, {"queue": (1, 2), "prefill": (2, 4)}),
        ({Phase.QUEUED: 1, Phase.FAILED: 4}, {"queue": (1, 4)}),
        # It moved to another decode node while it decoded.
        ({Phase.QUEUED: 1, Phase.PREFILLING: 2, Phase.DECODING: 4, Phase.MIGRATING: 5, Phase.MOVING: 6, Phase.DONE: 9},
         {"queue": (1, 2), "prefill": (2, 4), "decode": (4, 9)}),
        # A retry prefilled first after the answer had begun.
        ({Phase.QUEUED: 1, Phase.PREFILLING: 2, Phase.MOVING: 3, Phase.MIGRATING: 4, Phase.FAILED: 9},
         {"queue": (1, 2), "prefill": (2, 3), "hand_over": (3, 9)}),
    ],
)  # fmt: skip
def test_stages_follow_each_other_from_the_arrival_to_the_end(
    entered: dict[Phase, float], stages: dict[str, tuple[float, float]]
):
    assert {stage.name: (stage.start_s, stage.end_s) for stage in stages_of(life_with(entered))} == stages


def test_a_trace_tells_sizes_and_nodes_and_no_content():
    life = life_with({**REMOTE})
    life.report.prefill_node, life.report.decode_node = "p0", "d0"
    life.shown.generated = [7, 8, 9]
    outcome = outcome_of(life, "little")
    assert [dict(stage.attributes) for stage in outcome.stages] == [
        {}, {"headrace.node": "p0"}, {}, {"headrace.node": "d0"}
    ]  # fmt: skip
    assert outcome.attributes["gen_ai.usage.output_tokens"] == 3
    assert not any(isinstance(value, list | tuple) for value in outcome.attributes.values())


def test_a_failure_is_named_by_its_code():
    life = RequestLifecycle(REQUEST, max_attempts=1, now_s=1.0)
    life.on(GaveUp(ApiError(HTTPStatus.GATEWAY_TIMEOUT, "too late", code="deadline_exceeded")), 4.0)
    assert (outcome_of(life, "m").error, outcome_of(life, "m").end_s) == ("deadline_exceeded", 4.0)
