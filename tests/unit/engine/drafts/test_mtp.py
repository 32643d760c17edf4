"""Drafts of the model's own layer: answers and hits as without, and as many accepted wherever a request goes on."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from headrace.config import ConfigError
from headrace.engine.build import BuiltEngine
from headrace.engine.runner import ModelRunner
from headrace.engine.warm_up import warm_up
from headrace.grammar import regex_grammar
from headrace.kernels.dense.linear import LinearWeight
from headrace.models.mtp import MtpLayer
from headrace.request import Request, Sampling
from headrace.speculation.config import SpeculationConfig
from tests.support.engine.drafters import MTP_DRAFTS, ROOMY, mtp_engine_of
from tests.support.engine.driving import (
    GREEDY,
    assert_nothing_in_use,
    generate,
    request,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.interpreted import capture_layer
from tests.support.engine.mtp_checkpoints import add_mtp, train_mtp
from tests.support.engine.oracle import random_prompt
from tests.support.engine.recall import SHIPPED, recall_prompts
from tests.support.node.engine_pair import EnginePair, answer_with_a_move

PLAIN = replace(GREEDY, max_tokens=40)
# Of three tokens: which one comes next is not to be seen from the newest alone, but from the vector and the entries.
ANSWER = replace(PLAIN, bias_ids=(7, 9, 11), bias_values=(30.0, 30.0, 30.0))
# Of a seed whose numbers lie nowhere within 1e-7 of the border of two tokens.
RANDOM = Sampling(max_tokens=40, seed=3, temperature=0.9, top_p=0.95, repetition_penalty=1.2, ignore_eos=True)
MTP, NO_DRAFTS = MTP_DRAFTS, SpeculationConfig()
KNOWN, UNKNOWN = random_prompt(17), random_prompt(30)


@dataclass(frozen=True)
class Trained:
    """A checkpoint whose layer knows the greedy answer to KNOWN, and guesses badly elsewhere."""

    path: Path
    answer: list[int]


@pytest.fixture(scope="module")
def trained(tiny_checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    made: dict[str, Trained] = {}

    def get(family: str) -> Trained:
        if family not in made:
            path = Path(shutil.copytree(tiny_checkpoint(family), tmp_path_factory.mktemp("mtp") / family))
            layer = add_mtp(path)
            answer = generate(small_engine(path), request(KNOWN, ANSWER)).tokens
            train_mtp(path, layer, [[*KNOWN, *answer]], num_steps=30)
            made[family] = Trained(path, answer)
        return made[family]

    return get


def drafts(built: BuiltEngine) -> tuple[int, int]:
    """Tokens drafted, and accepted."""
    drafting = built.engine.drafting
    assert drafting is not None
    return drafting.drafted_tokens, drafting.accepted_tokens


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each pass of the layer."""
    rows: list[int] = []
    run = MtpLayer.__call__

    def counted(layer: MtpLayer, embedded: torch.Tensor, *rest: object) -> torch.Tensor:
        rows.append(len(embedded))
        return run(layer, embedded, *rest)

    monkeypatch.setattr(MtpLayer, "__call__", counted)
    return rows


def together(built: BuiltEngine, asked: list[Request]) -> list[list[int]]:
    runs = [submit(built, each) for each in asked]
    serve(built, *runs)
    assert_nothing_in_use(built)
    return [run.tokens for run in runs]


@pytest.mark.parametrize(
    ("family", "overlap"), [("qwen35", False), ("qwen35_moe", False), ("qwen3_next", False), ("qwen35", True)]
)
def test_answers_are_those_without_drafts(family: str, overlap: bool, trained) -> None:
    path = trained(family).path
    prompts = (KNOWN, random_prompt(1), random_prompt(65))
    asked = [request(prompt, sampling) for prompt in prompts for sampling in (ANSWER, PLAIN, RANDOM)]
    plain, built = small_engine(path), small_engine(path, speculation=MTP, overlap=overlap, cache_bytes=ROOMY)
    assert together(built, asked) == together(plain, asked)
    drafted, accepted = drafts(built)
    assert 15 < accepted < drafted
    if not overlap:
        assert built.engine.computed_tokens == plain.engine.computed_tokens


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices in float32 lie as on a GPU: rows of a head can change in place."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


def head_ids(built: BuiltEngine) -> set[int] | None:
    """Tokens that the layer's head has rows for; None: all."""
    head = built.engine._runner.model.draft_head
    assert head is not None
    return None if head.ids is None else set(head.ids.tolist())


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_head_of_few_tokens_drafts_those_that_occur(is_captured: bool, trained, unpacked) -> None:
    """Others have the rows of the answer's tokens before it; captured passes see the changes, too."""
    path, others = trained("qwen35").path, request([*range(100, 164)], replace(PLAIN, max_tokens=4))
    asked, expected = [request(KNOWN, ANSWER)], trained("qwen35").answer
    counts = []
    for speculation in (MTP, replace(MTP, draft_vocabulary=64)):
        built = small_engine(path, speculation=speculation, overlap=True, cache_bytes=ROOMY)
        if is_captured:
            capture_layer(built.engine._runner, 8, 256)
        together(built, [others])
        ids = head_ids(built)
        assert (ids is None) == (speculation is MTP)
        assert ids is None or (len(ids) == 64 and not {7, 9, 11} & ids)
        assert together(built, asked) == [expected]
        before = drafts(built)
        assert together(built, asked) == [expected]
        counts.append([now - then for now, then in zip(drafts(built), before, strict=True)])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("is_captured", [False, True])
def test_prompts_have_rows_before_their_first_drafts_and_answers_soon(is_captured: bool, trained, unpacked) -> None:
    """Also of a request that begins beside one whose drafts are made ahead, and of one that a grammar begins."""
    path, speculation = trained("qwen35").path, replace(MTP, draft_vocabulary=128)
    built = small_engine(path, speculation=speculation, overlap=True, cache_bytes=ROOMY)
    if is_captured:
        capture_layer(built.engine._runner, 8, 256)
    runner, lacking, prompts, runs = built.engine._runner, {}, {}, {}
    draft_tokens, draft_ahead = runner.draft_tokens, runner.draft_ahead

    def see() -> None:
        ids = head_ids(built)
        assert ids is not None
        for n, run in runs.items():
            if run.sequence.num_noted:
                lacking.setdefault(n, prompts[n] - ids)

    runner.draft_tokens = lambda *rest: (see(), draft_tokens(*rest))[1]  # type: ignore[method-assign]
    runner.draft_ahead = lambda *rest: (see(), draft_ahead(*rest))[1]  # type: ignore[method-assign]
    for n, first in enumerate((200, 212, 224)):
        prompts[n] = {*range(first, first + 12)}
        grammar = regex_grammar("abcabcabc(ab|ba){9,20}") if n == 2 else None
        runs[n] = submit(built, request([*prompts[n]], replace(PLAIN, max_tokens=60, grammar=grammar)))
        for _ in range(6):
            built.engine.admit()
            built.engine.step()
    serve(built, *runs.values())
    assert lacking == {0: set(), 1: set(), 2: set()}
    ids = head_ids(built)
    assert ids is not None and set(runs[0].tokens[:30]) <= ids


@pytest.mark.slow
def test_a_head_of_an_eighth_of_the_tokens_is_right_as_often(unpacked) -> None:
    """The shipped model, whose answers quote tokens of their prompts that no other prompt has."""
    asked = [request(prompt, replace(GREEDY, max_tokens=40)) for prompt in recall_prompts(120)]
    answers, shares = [], []
    for draft_vocabulary in (0, 512):
        speculation = replace(MTP, draft_vocabulary=draft_vocabulary)
        built = small_engine(SHIPPED, speculation=speculation, cache_bytes=1 << 29, max_running=16)
        answers.append(together(built, asked))
        ids, (drafted, accepted) = head_ids(built), drafts(built)
        assert ids is None if not draft_vocabulary else ids is not None and len(ids) == draft_vocabulary
        shares.append(accepted / drafted)
        print(f"{draft_vocabulary or 'all'} tokens: {accepted:,} of {drafted:,} drafts right")
    assert answers[0] == answers[1]
    assert shares[1] > shares[0] - 0.01


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_change_without_memory_is_made_later(is_captured: bool, trained, unpacked, monkeypatch) -> None:
    path, speculation = trained("qwen35").path, replace(MTP, draft_vocabulary=128)
    built = small_engine(path, speculation=speculation, overlap=True, cache_bytes=ROOMY)
    if is_captured:
        capture_layer(built.engine._runner, 8, 256)
    rows, refused = LinearWeight.rows, []

    def rows_once(weight: LinearWeight, index: torch.Tensor) -> torch.Tensor:
        if not refused:
            refused.append(index)
            raise torch.OutOfMemoryError("none")
        return rows(weight, index)

    monkeypatch.setattr(LinearWeight, "rows", rows_once)
    prompt = [*range(200, 220)]
    (answer,) = together(built, [request(prompt, PLAIN)])
    assert refused
    assert answer == generate(small_engine(path), request(prompt, PLAIN)).tokens
    ids = head_ids(built)
    assert ids is not None and set(prompt) <= ids
    model = built.engine._runner.model
    vector = torch.randn(1, model.config.hidden_size)
    assert torch.equal(model.draft_head(vector), model.head(vector)[:, model.draft_head.ids])


def test_drafts_where_they_pay_change_no_answer(trained) -> None:
    path = trained("qwen35").path
    asked = [request(prompt, ANSWER) for prompt in (KNOWN, UNKNOWN)]
    built = small_engine(path, speculation=replace(MTP, count="auto"), overlap=True)
    assert together(built, asked) == together(small_engine(path), asked)
    assert drafts(built)[0] > 0


@pytest.mark.parametrize("num_requests", [1, 5])
def test_a_step_makes_a_pass_for_each_place_of_its_drafts(num_requests: int, trained, passes) -> None:
    built = small_engine(trained("qwen35").path, speculation=MTP, cache_bytes=ROOMY)
    together(built, [request(random_prompt(20, seed), replace(ANSWER, max_tokens=6)) for seed in range(num_requests)])
    assert passes[:3] == [num_requests] * 3
    # Behind the prompt's token come five steps at most, whose drafts leave room for a token after them.
    assert len(passes) <= 3 + 3 + 2 + 1


def test_the_warm_up_runs_a_pass(trained, passes) -> None:
    """So no request waits for its kernels."""
    built = small_engine(trained("qwen35").path, speculation=MTP)
    warm_up(built.engine._runner, max_step_tokens=64, max_running=4, max_tokens=256, graphs=False)
    assert passes == [1]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_obeys_its_grammar(overlap: bool, trained) -> None:
    path = trained("qwen35").path
    wanted = replace(RANDOM, ignore_eos=False, grammar=regex_grammar("(ab|ba){3,9}c?"))
    asked = [request(KNOWN, replace(wanted, seed=seed)) for seed in range(3)]
    built = small_engine(path, speculation=MTP, overlap=overlap)
    assert together(built, asked) == together(small_engine(path), asked)


def test_a_chat_hits_what_it_hits_without_drafts(trained) -> None:
    path = trained("qwen35").path
    plain, built = (small_engine(path, checkpoint_policy="every", speculation=each) for each in (NO_DRAFTS, MTP))
    prompt = KNOWN
    for turn in range(3):
        asked = request(prompt, ANSWER)
        expected, run = generate(plain, asked), generate(built, asked)
        assert run.tokens == expected.tokens
        assert run.sequence.num_prefilled == expected.sequence.num_prefilled
        assert run.sequence.all_checkpoints == expected.sequence.all_checkpoints
        prompt = [*prompt, *run.tokens, *random_prompt(9, turn)]
    assert drafts(built)[1] > 25
    assert built.engine.cache.stats().totals == plain.engine.cache.stats().totals


def test_preempted_requests_get_the_answers_they_would_have_had(trained) -> None:
    path = trained("qwen35").path
    prompts = (KNOWN, *map(random_prompt, (100, 101, 102)))
    asked = [request(prompt, replace(ANSWER, max_tokens=80)) for prompt in prompts]
    scarce = mtp_engine_of(path, 30, 9)
    assert together(scarce, asked) == together(small_engine(path), asked)
    assert scarce.engine.preemptions > 0 and drafts(scarce)[1] > 10


def test_drafts_preempt_nobody(trained) -> None:
    """Both answers end in their last blocks, for which there is just enough room."""
    path = trained("qwen35").path
    asked = [request(KNOWN, replace(ANSWER, max_tokens=30 + extra)) for extra in (0, 1)]
    built = mtp_engine_of(path, 6, 9)
    assert together(built, asked) == together(small_engine(path), asked)
    assert built.engine.preemptions == 0 and drafts(built)[1] > 10


def test_a_pass_that_finds_too_little_memory_costs_its_drafts_alone(trained, monkeypatch) -> None:
    known = trained("qwen35")
    made, calls = ModelRunner.draft_tokens, []

    def fail_first(*inputs):
        calls.append(inputs)
        if len(calls) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(*inputs)

    monkeypatch.setattr(ModelRunner, "draft_tokens", fail_first)
    built = small_engine(known.path, speculation=MTP)
    assert together(built, [request(KNOWN, ANSWER)]) == [known.answer]
    assert drafts(built)[1] > 25


# ------------------------------------------------------------ acceptance


def locally(path: Path) -> tuple[int, int]:
    """Drafts, and accepted ones, of an answer that one engine computes alone."""
    built = small_engine(path, speculation=MTP)
    generate(built, request(KNOWN, ANSWER))
    return drafts(built)


@pytest.mark.parametrize("family", ["qwen35", "qwen35_moe"])
def test_as_many_drafts_are_right_after_a_hand_over(family: str, trained) -> None:
    known = trained(family)
    prefill, decode = (small_engine(known.path, speculation=MTP) for _ in range(2))
    pair = EnginePair(prefill, decode)
    exchange = pair.start(request(KNOWN, ANSWER), computes_locally=False)
    while not exchange.is_over:
        pair.step()
    assert exchange.tokens == known.answer
    assert drafts(prefill) == (0, 0)
    assert drafts(decode) == locally(known.path)


def test_as_many_drafts_are_right_behind_a_hit(trained) -> None:
    """The prompt goes on into the answer."""
    known, length = trained("qwen35_moe"), 32
    whole = [*KNOWN, *known.answer]
    asked = request(whole[: length + 1], replace(ANSWER, max_tokens=8))
    fresh, warm = (small_engine(known.path, checkpoint_policy="every", speculation=MTP) for _ in range(2))
    generate(warm, request(whole[:length], replace(ANSWER, max_tokens=1)))
    before = drafts(warm)
    assert before == (0, 0)
    expected, run = generate(fresh, asked), generate(warm, asked)
    assert (
        run.sequence.num_prefilled < expected.sequence.num_prefilled
        and run.tokens == expected.tokens == whole[length + 1 :][:8]
    )
    assert drafts(warm) == drafts(fresh)


@pytest.mark.parametrize("num_steps", [2, 4])
def test_as_many_drafts_are_right_after_a_move(num_steps: int, trained) -> None:
    known = trained("qwen35_moe")
    here, there = (small_engine(known.path, speculation=MTP) for _ in range(2))
    tokens = answer_with_a_move(here, there, request(KNOWN, ANSWER), num_steps)
    assert tokens == known.answer
    both = [sum(counts) for counts in zip(drafts(here), drafts(there), strict=True)]
    assert tuple(both) == locally(known.path)


# ------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("family", "named"), [("granite", "models of GraniteMoeHybridForCausalLM have no"), ("qwen35", "has no")]
)
def test_a_model_without_the_layer_is_refused_with_a_remedy(family: str, named: str, tiny_checkpoint) -> None:
    with pytest.raises(ConfigError, match=f"speculation.drafter mtp: .*{named} MTP layer.*set drafter: ngram, suffix"):
        small_engine(tiny_checkpoint(family), speculation=MTP)


def test_random_weights_draft_too(trained) -> None:
    built = small_engine(trained("qwen35").path, speculation=MTP, load_format="dummy")
    generate(built, request(KNOWN, ANSWER))
    assert drafts(built)[0] > 0
