"""Plans where the caches of the nodes that are not meant for prompts do not keep what comes back."""

from dataclasses import replace

import pytest

from headrace.wire.node_messages import Role
from router.routing.plan import Objectives
from router.routing.policies.cost import answer_part, fetched_prompt_part, meeting, prompt_part
from tests.support.router.priced_nodes import REQUEST, busy, choose, line, node

SHORT = replace(REQUEST, caches_are_short=True)


@pytest.mark.parametrize(("request_", "chosen"), [(REQUEST, "d"), (SHORT, "p")])
def test_a_node_for_prompts_generates_from_what_it_keeps(request_: object, chosen: str) -> None:
    turn = replace(request_, num_tokens=17536, objectives=Objectives(token_gap_s=0.01))  # type: ignore[type-var]
    prompts = node("p", Role.PREFILL, hit=16384, prompt_share=0.9, **line(2048))
    assert choose(prompts, node("d", **busy(20)), request=turn).decode == chosen


@pytest.mark.parametrize("empty_tokens", [0, 1 << 20])
def test_a_second_copy_costs_twice_as_much(empty_tokens: int) -> None:
    holder = node("a", hit=16000)
    other = node("b", empty_tokens=empty_tokens)
    copied_s = [answer_part(each, meeting(each, other)).received_s for each in (REQUEST, SHORT)]
    assert copied_s[1] == pytest.approx(2 * copied_s[0])
    others_s = []
    for each in (REQUEST, SHORT):
        fetched = fetched_prompt_part(each, other, holder)
        assert fetched is not None
        own = prompt_part(each, meeting(each, other, 16000))
        others_s.append(fetched.others_s - own.others_s)
    assert others_s[1] == pytest.approx(2 * others_s[0])
