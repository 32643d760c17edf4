"""Stop conditions of a request, without a model."""

from dataclasses import replace

import pytest

from headrace.cache.hashing import PrefixHasher
from headrace.engine.sampling.stopping import StopRules
from headrace.engine.sequence import Job, Sequence
from headrace.request import FinishReason, Sampling
from tests.support.engine.driving import GREEDY, request, resume_locally

EOS = 2
RULES = StopRules(eos_token_ids=(EOS,), max_model_tokens=20)
PROMPT = [7] * 4
SAMPLING = replace(GREEDY, max_tokens=8, ignore_eos=False)


def sequence(answer: list[int], sampling: Sampling = SAMPLING, max_new: int = 8) -> Sequence:
    made = Sequence(Job(request(PROMPT, sampling), resume_locally, max_new, 0.0, print), PrefixHasher(16))
    for token in answer:
        made.append(token)
    return made


@pytest.mark.parametrize(
    ("answer", "changes", "reason"),
    [
        ([5, 6], {}, None),
        ([5, EOS], {}, FinishReason.STOP),
        ([5, EOS], {"ignore_eos": True}, None),
        ([5, EOS], {"min_tokens": 3}, None),
        ([5, 9], {"stop_token_ids": (9,)}, FinishReason.STOP),
        ([5] * 8, {}, FinishReason.LENGTH),
        ([5] * 16, {"max_tokens": 100}, FinishReason.LENGTH),
    ],
)
def test_an_answer_ends_at_a_stop_token_or_at_a_limit(answer, changes, reason) -> None:
    assert RULES.finish_reason(sequence(answer, replace(SAMPLING, **changes))) is reason


@pytest.mark.parametrize("num_before", [0, 1, 3])
@pytest.mark.parametrize("stop_at", [None, 0, 1, 2, 3])
@pytest.mark.parametrize(
    "changes",
    [{}, {"ignore_eos": True}, {"min_tokens": 3}, {"stop_token_ids": (9,)}, {"max_tokens": 5}, {"max_tokens": 100}],
)
def test_tokens_taken_at_once_are_those_taken_one_by_one(num_before, stop_at, changes) -> None:
    rules, sampling = StopRules((EOS,), max_model_tokens=9), replace(SAMPLING, **changes)
    for stop_id in (EOS, 9):
        new = [5, 6, 5, 6]
        if stop_at is not None:
            new[stop_at] = stop_id
        one_by_one, finish, number = sequence([5] * num_before, sampling), None, 0
        while finish is None and number < len(new):
            one_by_one.append(new[number])
            finish, number = rules.finish_reason(one_by_one), number + 1
        assert rules.taken(sequence([5] * num_before, sampling), new) == (number, finish)


def test_stop_tokens_are_banned_until_min_tokens_are_there_pending_ones_included() -> None:
    early = sequence([5], replace(SAMPLING, min_tokens=3, stop_token_ids=(9,)))
    assert RULES.draw(early, pending=0).banned == (EOS, 9)
    early.append(6)
    assert RULES.draw(early, pending=None).banned == (EOS, 9)
    assert RULES.draw(early, pending=0).banned == ()


@pytest.mark.parametrize(("num_answered", "max_new"), [(7, 8), (3, 4)])
def test_a_pending_token_counts_towards_the_limits(num_answered: int, max_new: int) -> None:
    almost = sequence([5] * num_answered, max_new=max_new)
    assert RULES.most_new(almost) == 1


def test_the_last_token_of_an_answer_is_never_computed() -> None:
    assert RULES.last_computed(sequence([], max_new=8)) == 4 + 7
    assert RULES.last_computed(sequence([], max_new=1)) == 4
    assert RULES.last_computed(sequence([], max_new=100)) == 20
