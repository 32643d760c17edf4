"""The same engine on a CUDA device: greedy tokens in float32 are those of the CPU. Runs where there is one."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from headrace.engine.graphs.captured_passes import CapturedPasses
from headrace.engine.runner import Launched, ModelRunner
from headrace.engine.sampling.draw import Draw, PromptRows
from headrace.engine.sequence import Scored
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.kernels.dense.linear import LinearWeight
from headrace.models.weights import load_config, random_model
from headrace.request import Request, Sampling
from headrace.speculation.config import SpeculationConfig
from tests.support.engine.driving import (
    GREEDY,
    assert_nothing_in_use,
    engine_of,
    request,
    run_all,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.interpreted import forget_all
from tests.support.engine.mtp_checkpoints import add_mtp
from tests.support.engine.oracle import random_prompt
from tests.support.engine.recall import SHIPPED, recall_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

FAMILIES = ("granite", "granite_moe", "qwen35", "qwen35_moe")
LENGTHS = (1, 16, 17, 64, 65, 300)
GREEDY_DRAW = Draw(Sampling(max_tokens=1, seed=0, temperature=0.0), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_on_cuda_equal_those_on_the_cpu(family: str, tiny_checkpoint) -> None:
    path = tiny_checkpoint(family)

    def answers(**device: object) -> list[list[int]]:
        built = small_engine(path, dtype="float32", **device)
        runs = [submit(built, request(random_prompt(n), replace(GREEDY, max_tokens=32))) for n in LENGTHS]
        run_all(built)
        return [run.tokens for run in runs]

    expected = answers(device="cpu")
    assert answers(device="cuda") == expected
    assert answers(device="cuda", cuda_graphs=False, overlap=False) == expected


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_greedy_tokens_with_drafts_on_cuda_equal_those_without(drafter: str, tiny_checkpoint, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_checkpoint("qwen35"), tmp_path / "mtp"))
    add_mtp(path)
    speculation, found = SpeculationConfig(drafter, "fixed", 3), []
    for settings in ({}, {"speculation": speculation}, {"speculation": speculation, "cuda_graphs": False}):
        built = small_engine(path, dtype="float32", device="cuda", **settings)
        runs = [submit(built, request(random_prompt(n), replace(GREEDY, max_tokens=32))) for n in LENGTHS]
        run_all(built)
        drafting = built.engine.drafting
        found.append(([run.tokens for run in runs], drafting and (drafting.drafted_tokens, drafting.accepted_tokens)))
    assert found[0][0] == found[1][0] == found[2][0]
    assert all(drafted > 0 for _, (drafted, _) in found[1:])


def test_checks_behind_checks_change_nobodys_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of the shipped layer, of which most are right in some answers and few in others, that come and go."""
    num_behind, launch = [], ModelRunner.launch

    def noted(self: ModelRunner, inputs: list[SequenceInput], *rest: object) -> Launched:
        num_behind.append(sum(entry.behind is not None for entry in inputs))
        return launch(self, inputs, *rest)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    asked, found, mtp = recall_requests(), [], SpeculationConfig("mtp", "fixed", 3)
    for settings in ({}, {"speculation": mtp, "overlap": False}, {"speculation": mtp}):
        built = small_engine(SHIPPED, dtype="float32", device="cuda", cache_bytes=1 << 30, max_running=8, **settings)
        num_behind.clear()
        runs = [submit(built, each) for each in asked]
        run_all(built)
        found.append([run.tokens for run in runs])
    assert found[0] == found[1] == found[2]
    drafting = built.engine.drafting
    assert drafting is not None and drafting.accepted_tokens > drafting.drafted_tokens / 4
    assert len([number for number in num_behind if number]) > len(num_behind) / 2


def recall_requests() -> list[Request]:
    """Twelve, of which eight run at once: the prompts of the others come beside drafts."""
    return [
        request([*prompt, *random_prompt(n % 3)], replace(GREEDY, max_tokens=20 + 11 * n, temperature=n % 2 * 0.3))
        for n, prompt in enumerate(recall_prompts(12))
    ]


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_drafts_and_prompts_in_one_pass_change_nobodys_tokens(drafter: str) -> None:
    """As in a check and a prefill, and without drafts."""
    found, drafting = [], {"speculation": SpeculationConfig(drafter, "fixed", 3)}
    for settings, in_one in (({}, False), (drafting, False), (drafting, True)):
        built = small_engine(SHIPPED, dtype="float32", device="cuda", cache_bytes=1 << 30, max_running=8, **settings)
        graphs = built.engine._runner._graphs
        if not in_one:
            graphs.mixed_checks = ()
        replays = counted(graphs.mixed_checks)
        runs = [submit(built, each) for each in recall_requests()]
        run_all(built)
        found.append([run.tokens for run in runs])
        assert bool(replays) is in_one
    assert found[0] == found[1] == found[2]


def counted(mixed_checks: tuple[CapturedPasses, ...]) -> list[int]:
    """A list that gets the number of inputs of each of their replays from now on."""
    replays: list[int] = []

    def noted(run: Callable[..., torch.Tensor], inputs: list[SequenceInput]) -> torch.Tensor:
        replays.append(len(inputs))
        return run(inputs)

    for passes in mixed_checks:
        passes.run = partial(noted, passes.run)
    return replays


def test_drafts_by_a_head_in_fp8_are_right_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recall answers of the shipped model in bf16, by a copy of its head in FP8 and by the head itself."""
    asked = [request(prompt, replace(GREEDY, max_tokens=40)) for prompt in recall_prompts(200)]
    counts = []
    for in_fp8 in (LinearWeight.in_fp8, lambda weight: weight):
        monkeypatch.setattr(LinearWeight, "in_fp8", in_fp8)
        settings = {"dtype": "bfloat16", "device": "cuda", "cache_bytes": 4 << 30, "max_running": 32}
        built = small_engine(SHIPPED, speculation=SpeculationConfig("mtp", "fixed", 3), **settings)
        for each in asked:
            submit(built, each)
        run_all(built)
        drafting = built.engine.drafting
        assert drafting is not None
        counts.append((drafting.accepted_tokens, drafting.drafted_tokens))
        print(f"{counts[-1][0]:,} of {counts[-1][1]:,} drafts right")
    ours, theirs = (accepted / drafted for accepted, drafted in counts)
    assert ours > theirs - 0.01


@pytest.mark.parametrize("family", ["granite", "qwen35"])
def test_penalised_and_scored_requests_on_cuda_answer_as_on_the_cpu(family: str, tiny_checkpoint) -> None:
    """With overlap the device counts each token before the host knows it; beside them requests without penalties."""
    path, samplings = tiny_checkpoint(family), []
    for repetition, presence, frequency in ((1.3, 0.0, 0.0), (1.0, 0.6, 0.2), (1.2, -0.1, 0.3), (1.0, 0.0, 0.0)):
        penalties = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
        samplings.append(replace(GREEDY, max_tokens=40, ignore_eos=False, min_tokens=40, **penalties))

    def answers(**device: object) -> tuple[list[list[int]], list[float]]:
        built = small_engine(path, dtype="float32", **device)
        runs = [submit(built, request(random_prompt(20 + i), each)) for i, each in enumerate(samplings)]
        scored = submit(built, request(random_prompt(300), GREEDY), prompt_logprobs=3)
        run_all(built)
        parts = [event.logprobs for event in scored.events if isinstance(event, Scored)]
        return [run.tokens for run in (*runs, scored)], [logprob for part in parts for logprob in part.logprobs]

    expected, logprobs = answers(device="cpu")
    for settings in ({}, {"cuda_graphs": False}, {"overlap": False}):
        tokens, ours = answers(device="cuda", **settings)
        assert tokens == expected
        assert ours == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.parametrize("family", ["granite", "qwen35"])
def test_preempted_requests_on_cuda_get_the_answers_of_the_cpu(family: str, tiny_checkpoint) -> None:
    path, sampling = tiny_checkpoint(family), replace(GREEDY, max_tokens=100)
    answers = []
    for device in ("cpu", "cuda"):
        built = engine_of(path, 36, 8, device=device, dtype="float32")
        runs = [submit(built, request(random_prompt(n), sampling)) for n in (100, 101, 102, 103)]
        serve(built, *runs)
        assert built.engine.preemptions > 0
        assert_nothing_in_use(built)
        answers.append([run.tokens for run in runs])
    assert answers[0] == answers[1]


def prefilled(path: Path, lengths: tuple[int, ...], dtype: str) -> ModelRunner:
    """Sequence i stands in blocks 16 i .. 16 i + 15 and slot i; everything else is NaN. States are of `dtype`, too."""
    model = random_model(load_config(path), getattr(torch, dtype), "cuda")
    runner = ModelRunner(model, CacheMemory(model.cache_layout(16, dtype), 16 * len(lengths), 24, "cuda"))
    forget_all(runner)
    steps = [SequenceInput(random_prompt(n), 0, blocks_of(i), None, i) for i, n in enumerate(lengths)]
    runner.launch(steps, greedy_draws(lengths))
    return runner


def blocks_of(sequence: int) -> range:
    return range(16 * sequence, 16 * sequence + 16)


def greedy_draws(lengths: tuple[int, ...]) -> list[tuple[int, Draw]]:
    return [(row, GREEDY_DRAW) for row in range(len(lengths))]


def decode_steps(lengths: tuple[int, ...], n: int) -> list[SequenceInput]:
    return [SequenceInput((0,), length + n, blocks_of(i), i, i, future_token=i) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(5,), (3, 64, 100), (1, 15, 16, 17, 63)], ids=["full", "padded", "more-padded"])
def test_replays_give_the_tokens_of_plain_steps(family: str, lengths: tuple[int, ...], tiny_checkpoint) -> None:
    answers = []
    for replays in (False, True):
        runner = prefilled(tiny_checkpoint(family), lengths, "float32")
        if replays:
            runner.capture_decodes(8, 256)
        launched = [runner.launch(decode_steps(lengths, n), greedy_draws(lengths)) for n in range(20)]
        answers.append([[token.id for token in each.drawn.tokens()] for each in launched])
        # What nobody owns stays as it was, padding or not.
        assert all(pool[len(lengths) :].isnan().all() for pools in runner.memory.states for pool in pools)
        assert launched[-1].logits.rows.isfinite().all()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_replays_in_bfloat16_differ_by_rounding_only(family: str, tiny_checkpoint) -> None:
    """Padding may choose another product's kernel, and a longer table another split of the context."""
    lengths, logits = (3, 64, 100), []
    for replays in (False, True):
        runner = prefilled(tiny_checkpoint(family), lengths, "bfloat16")
        if replays:
            runner.capture_decodes(8, 256)
        logits.append(runner.launch(decode_steps(lengths, 0), greedy_draws(lengths)).logits.in_float32())
    torch.testing.assert_close(logits[1], logits[0], atol=0.1 * float(logits[0].std()), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("replays", [False, True], ids=["plain", "replayed"])
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "drawn"])
@pytest.mark.parametrize("is_penalised", [False, True], ids=["free", "penalised"])
def test_no_launch_waits_for_the_device(
    family: str, replays: bool, temperature: float, is_penalised: bool, tiny_checkpoint
) -> None:
    """Decodes, and decodes beside a chunk of a prompt that leaves a state on its way; then the same chunk, scored."""
    lengths = (3, 64, 100)
    runner = prefilled(tiny_checkpoint(family), lengths, "bfloat16")
    if replays:
        runner.capture_decodes(8, 256)
    draw = GREEDY_DRAW._replace(sampling=Sampling(max_tokens=1, seed=1, temperature=temperature, top_p=0.9))
    if is_penalised:
        sampling = replace(draw.sampling, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=2)
        draw = draw._replace(sampling=sampling, banned=(1, 2), counts_row=runner.token_counts.row("r", [5, 6], 1))
    draws = [(row, draw) for row in range(len(lengths))]
    if is_penalised:
        draws = draws[:1] + [(row, draw._replace(counts_row=None)) for row, draw in draws[1:]]
    chunk = SequenceInput(random_prompt(40), lengths[0] + 2, blocks_of(0), 0, 0, emit=((20, 9),))
    steps = [decode_steps(lengths, 0), decode_steps(lengths, 1), [chunk, *decode_steps(lengths, 2)[1:]]]
    scored = [replace(chunk, num_logits=40), *decode_steps(lengths, 2)[1:]]
    scored_draws = [(row + 39, draw) for row, draw in draws]
    rows = [PromptRows(0, lengths[0] + 3, [1] * 39, 3)]
    for step in steps:  # compiles what is new
        runner.launch(step, draws)
    runner.launch(scored, scored_draws, rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = [runner.launch(step, draws) for step in steps]
        launched.append(runner.launch(scored, scored_draws, rows))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(each.drawn.tokens()) == 3 for each in launched)
    assert sum(len(part.logprobs) for part in launched[-1].scores[0].parts()) == 39
