"""Prices of plans on nodes that draft: answers of fewer steps, and prompts between longer ones."""

from dataclasses import replace

import pytest

from headrace.wire.node_messages import Role
from router.routing.plan import Objectives
from router.routing.policies.cost import answer_part, held_back_s, meeting, prompt_part
from tests.support.router.priced_nodes import REQUEST, busy, choose, line, node


def test_answers_are_as_fast_as_their_nodes_drafts_make_them() -> None:
    plain, drafting = (node(name, **busy(20), answer_pace=pace) for name, pace in (("a", 1.0), ("b", 0.4)))
    parts = [answer_part(REQUEST, meeting(REQUEST, each)) for each in (plain, drafting)]
    assert parts[1].rest_s == pytest.approx(0.4 * parts[0].rest_s)
    assert parts[1].others_s == pytest.approx(0.4 * parts[0].others_s)
    assert parts[1].token_gap_s == parts[0].token_gap_s, "a node whose steps with drafts are too long makes none"
    assert choose(plain, drafting).decode == "b"


@pytest.mark.parametrize("gap_s", [None, 0.02])
def test_prompts_come_between_steps_that_drafts_make_longer(gap_s: float | None) -> None:
    request = replace(REQUEST, objectives=Objectives(token_gap_s=gap_s))
    plain, drafting = (
        node(name, **busy(20), answer_pace=0.5, step_stretch=stretch) for name, stretch in (("b", 1.0), ("a", 1.5))
    )
    parts = [prompt_part(request, meeting(request, each)) for each in (plain, drafting)]
    assert parts[1].first_token_s > parts[0].first_token_s
    assert choose(drafting, plain, request=request).prefill == "b"


def test_an_answer_between_prompts_has_fewer_steps_with_drafts() -> None:
    load = {**busy(20), **line(*[200_000] * 4)}
    plain, drafting = (node("a", **load, step_stretch=stretch) for stretch in (1.0, 2.0))
    parts = [answer_part(REQUEST, meeting(REQUEST, each)) for each in (plain, drafting)]
    alone_s = answer_part(REQUEST, meeting(REQUEST, node("a", **busy(20)))).rest_s
    stalled_s = [part.rest_s - alone_s for part in parts]
    assert stalled_s[1] == pytest.approx(stalled_s[0] / 2), "each with a full chunk, half as many steps"


@pytest.mark.parametrize(("role", "num_decoding"), [(Role.PREFILL, 0), (Role.DECODE, 20)])
def test_prompts_lose_more_of_a_step_to_an_answer_with_drafts(role: Role, num_decoding: int) -> None:
    request, lost = replace(REQUEST, objectives=Objectives(token_gap_s=0.05)), []
    for stretch in (1.0, 2.0):
        drafting = node("a", role, **busy(num_decoding), **line(40_000), answer_pace=2.0, step_stretch=stretch)
        met = meeting(request, drafting)
        of_answers_s = answer_part(
            request, met._replace(node=node("a", **busy(num_decoding), answer_pace=2.0))
        ).others_s
        part = answer_part(request, met)
        lost.append((part.others_s - (of_answers_s if num_decoding else 0.0)) / part.rest_s)
    assert lost[1] > 1.2 * lost[0] > 0


def test_a_first_token_that_is_handed_over_waits_for_whole_steps_with_drafts() -> None:
    request = replace(REQUEST, objectives=Objectives(token_gap_s=0.05))
    nodes = [node("d", answer_pace=0.5, step_stretch=stretch) for stretch in (1.0, 2.0)]
    held = [held_back_s(request, answer_part(request, meeting(request, each)), 0.01) for each in nodes]
    assert held[1] - 0.01 == pytest.approx(2 * (held[0] - 0.01))
