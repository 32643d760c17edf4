"""The stages of a request that has ended, from the times that its life has noted: for metrics and traces. Pure."""

from __future__ import annotations

from headrace.tracing import Outcome, Stage, Value
from router.requests.lifecycle import RequestLifecycle
from router.requests.states import RequestPhase

STAGES = QUEUE, PREFILL, HAND_OVER, DECODE = "queue", "prefill", "hand_over", "decode"
_BEGINS = (
    (QUEUE, RequestPhase.QUEUED),
    (PREFILL, RequestPhase.PREFILLING),
    (HAND_OVER, RequestPhase.MOVING),
    (DECODE, RequestPhase.DECODING),
)


def stages_of(life: RequestLifecycle, now_s: float = 0.0) -> list[Stage]:
    """The stages that the request has reached, in order; each ends where the next one begins.

    queue      from the arrival until a node has the prompt: turn, choice of nodes, reservation
    prefill    until the first token is there: the node's own line, and the computation
    hand_over  from then until blocks and state are where the answer goes on: what the transfer is not hidden behind
    decode     until the end; a request that began again on other nodes spends that time here, or in an earlier stage

    Each begins when it was first entered. The last one of a request that is not over ends at `now_s`.
    """
    entered = life.entered_s
    end_s = entered.get(RequestPhase.DONE, entered.get(RequestPhase.FAILED, now_s))
    # A request that moves while it decodes enters MOVING late: that is no stage of its own.
    decoding_s = entered.get(RequestPhase.DECODING, end_s)
    begun = [(name, entered[phase]) for name, phase in _BEGINS if phase in entered and entered[phase] <= decoding_s]
    ends = [start_s for _, start_s in begun[1:]] + [end_s]
    nodes = {
        PREFILL: life.report.decode_node if life.report.path == "local" else life.report.prefill_node,
        DECODE: life.report.decode_node,
    }
    return [
        Stage(name, start_s, max(start_s, stage_end_s), {"headrace.node": node} if (node := nodes.get(name)) else {})
        for (name, start_s), stage_end_s in zip(begun, ends, strict=True)
    ]


def ended_s(life: RequestLifecycle) -> float:
    """When the request was done or failed."""
    entered = life.entered_s
    return entered.get(RequestPhase.DONE) or entered.get(RequestPhase.FAILED) or max(entered.values())


def outcome_of(life: RequestLifecycle, model: str) -> Outcome:
    """The request as its trace tells it: sizes, nodes and times, nothing of its content."""
    report, num_prompt = life.report, life.request.num_prompt_tokens
    attributes: dict[str, Value] = {
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": len(life.generated),
        "headrace.request_id": life.request.request_id,
        "headrace.cached_tokens": report.cached_tokens(num_prompt),
        "headrace.path": report.path,
        "headrace.migrations": report.migrations,
        "headrace.moves": report.moves,
    }
    if life.finish is not None:
        attributes["headrace.finish_reason"] = life.finish.value
    error = "" if life.failure is None else life.failure.code or life.failure.message
    return Outcome(ended_s(life), stages_of(life), attributes, error)
