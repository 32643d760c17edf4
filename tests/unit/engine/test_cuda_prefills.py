"""Short prefills replayed on a CUDA device: token for token and state for state those that are launched one by one."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from headrace.engine.graphs.captured_passes import Captured, CudaCapture
from headrace.engine.graphs.prefill_inputs import MOST_SEQUENCES, MOST_WRITES
from headrace.engine.runner import Launched, ModelRunner
from headrace.engine.sampling.draw import Draw
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.model import HybridModel
from headrace.models.weights import load_config, random_model
from headrace.request import Sampling
from tests.support.engine.driving import (
    GREEDY,
    Run,
    assert_nothing_in_use,
    generate,
    request,
    run_all,
    serve,
    small_engine,
    submit,
)
from tests.support.engine.oracle import random_prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

FAMILIES = ("granite", "granite_moe", "qwen35", "qwen35_moe")
BLOCK_SIZE, BLOCKS_EACH, NUM_SEQUENCES, NUM_SLOTS = 16, 64, MOST_SEQUENCES + 1, 48
MAX_TOKENS = BLOCK_SIZE * BLOCKS_EACH
GREEDY_DRAW = Draw(Sampling(max_tokens=1, seed=0, temperature=0.0), 0)


class Counted:
    """Captures on the device, and how often what it captured was replayed."""

    def __init__(self) -> None:
        self.replays = 0
        self._capture = CudaCapture("prefill", 1)

    def __call__(self, work) -> Captured:
        captured = self._capture(work)

        def replay() -> None:
            self.replays += 1
            captured.replay()

        return Captured(replay, captured.logits)


def runner_of(path, dtype: str, state_dtype: str) -> ModelRunner:
    """Over memory of NaN."""
    return runner_around(random_model(load_config(path), getattr(torch, dtype), "cuda"), state_dtype)


def runner_around(model: HybridModel, state_dtype: str) -> ModelRunner:
    layout = model.cache_layout(BLOCK_SIZE, state_dtype)
    runner = ModelRunner(model, CacheMemory(layout, BLOCKS_EACH * NUM_SEQUENCES, NUM_SLOTS, "cuda"))
    for pool in pools(runner):
        pool.fill_(float("nan"))
    return runner


def pools(runner: ModelRunner) -> list[Tensor]:
    return runner.memory.pools


def blocks_of(sequence: int) -> list[int]:
    """In no order."""
    return [(37 * block + 5) % BLOCKS_EACH + BLOCKS_EACH * sequence for block in range(BLOCKS_EACH)]


class Prompts:
    """Sequences that grow by a few tokens a pass; where each stands, and in which slot."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._prompts = [random_prompt(MAX_TOKENS, seed=100 + i) for i in range(NUM_SEQUENCES)]
        self._at: list[tuple[int, int | None]] = [(0, None)] * NUM_SEQUENCES

    def next_pass(self, num_rows: int) -> list[SequenceInput]:
        """A few sequences, fresh ones and resumed ones, some in place, some leaving states on the way."""
        return self._steps(num_rows, self._random.choice((1, 1, 2, 3, MOST_SEQUENCES)), singles=0.0)

    def next_mix(self, num_rows: int) -> list[SequenceInput]:
        """As `next_pass`, of all sequences, in any order; some of them compute one token, with logits or without."""
        return self._steps(num_rows, NUM_SEQUENCES, singles=0.4)

    def _steps(self, num_rows: int, num_sequences: int, singles: float) -> list[SequenceInput]:
        chosen = self._random.sample(range(NUM_SEQUENCES), num_sequences)
        used = {slot for _, slot in self._at if slot is not None}
        free = [slot for slot in range(NUM_SLOTS) if slot not in used]
        return [self._step(sequence, num_rows // num_sequences, singles, free) for sequence in chosen]

    def _step(self, sequence: int, most_tokens: int, singles: float, free: list[int]) -> SequenceInput:
        start, src = self._at[sequence]
        is_single = self._random.random() < singles
        length = 1 if is_single else self._random.randint(2, min(most_tokens, MAX_TOKENS))
        if start + length > MAX_TOKENS:
            start, src = 0, None  # another prompt in the same blocks
        end = start + length
        inside = range(start // BLOCK_SIZE * BLOCK_SIZE + BLOCK_SIZE, end, BLOCK_SIZE)
        kept = sorted(self._random.sample(inside, min(len(inside), self._random.randint(0, 1))))
        dst = src if src is not None and self._random.random() < 0.5 else free.pop()
        emit = tuple((boundary, free.pop()) for boundary in kept)
        num_logits = int(self._random.random() < 0.8)
        self._at[sequence] = end, dst
        tokens = self._prompts[sequence][start:end]
        return SequenceInput(tokens, start, blocks_of(sequence), src, dst, emit, num_logits)


def launch(runner: ModelRunner, steps: list[SequenceInput]) -> Launched:
    return runner.launch(steps, [(row, GREEDY_DRAW) for row in range(sum(step.num_logits for step in steps))])


def assert_same_memory(replayed: ModelRunner, plain: ModelRunner, tolerance: float) -> None:
    """Within so many standard deviations, and NaN in the same places."""
    for ours, theirs in zip(pools(replayed), pools(plain), strict=True):
        written = theirs[~theirs.isnan()].float()
        bound = tolerance * float(written.std())
        torch.testing.assert_close(ours.float(), theirs.float(), atol=bound, rtol=tolerance, equal_nan=True)


def assert_same_memory_by_norm(replayed: ModelRunner, plain: ModelRunner, tolerance: float) -> None:
    """Each block and each state of each layer differs by so small a part of its length, and NaN in the same places.

    Of a hundred million elements some are far off by rounding alone; a lost or strange row is a quarter of a block.
    """
    for ours, theirs in zip(pools(replayed), pools(plain), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        ours, theirs = (pool.float().nan_to_num().flatten(2) for pool in (ours, theirs))
        worst = ((ours - theirs).norm(dim=2) / theirs.norm(dim=2).clamp(min=1e-6)).max()
        assert worst <= tolerance, f"{float(worst):.4f} of {tuple(theirs.shape)}"


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_in_a_row_equal_plain_ones_in_float32(family: str, tiny_checkpoint) -> None:
    path, prompts, capture = tiny_checkpoint(family), Prompts(seed=1), Counted()
    plain, replayed = (runner_of(path, "float32", "float32") for _ in range(2))
    replayed.capture_prefills(384, MAX_TOKENS, capture)
    for n in range(60):
        steps = prompts.next_pass(num_rows=(16, 40, 64, 200, 384)[n % 5])
        ours, theirs = launch(replayed, steps), launch(plain, steps)
        assert ours.logits.rows.shape == theirs.logits.rows.shape
        assert [token.id for token in ours.drawn.tokens()] == [token.id for token in theirs.drawn.tokens()], f"pass {n}"
        assert_same_memory(replayed, plain, 1e-2)
    assert capture.replays == 60


@pytest.mark.parametrize("in_one", [False, True], ids=["apart", "in one pass"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_any_mix_are_replays_and_equal_plain_ones(family: str, in_one: bool, tiny_checkpoint) -> None:
    """More prompts than a pass takes or writes states for, more rows than its largest size, and chunks of one token."""
    path, prompts, capture = tiny_checkpoint(family), Prompts(seed=4), Counted()
    plain, replayed = (runner_of(path, "float32", "float32") for _ in range(2))
    replayed.capture_decodes(NUM_SEQUENCES, MAX_TOKENS, capture)
    replayed.capture_prefills(128, MAX_TOKENS, capture)
    if in_one:
        replayed.capture_mixes(capture)
    for n in range(40):
        steps, replays = prompts.next_mix(num_rows=NUM_SEQUENCES * (2, 3, 5, 12, 40)[n % 5]), capture.replays
        ours, theirs = launch(replayed, steps), launch(plain, steps)
        assert capture.replays > replays
        assert ours.logits.rows.shape == theirs.logits.rows.shape
        assert [token.id for token in ours.drawn.tokens()] == [token.id for token in theirs.drawn.tokens()], f"step {n}"
        assert_same_memory(replayed, plain, 1e-2)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_in_bfloat16_differ_by_rounding_only(family: str, state_dtype: str, tiny_checkpoint) -> None:
    """Each from the same memory: padding may choose another product's kernel."""
    path, prompts, capture = tiny_checkpoint(family), Prompts(seed=2), Counted()
    plain, replayed = (runner_of(path, "bfloat16", state_dtype) for _ in range(2))
    replayed.capture_prefills(384, MAX_TOKENS, capture)
    for n in range(20):
        steps = prompts.next_pass(num_rows=(16, 40, 64, 200, 384)[n % 5])
        for ours, theirs in zip(pools(replayed), pools(plain), strict=True):
            ours.copy_(theirs)
        logits, expected = launch(replayed, steps).logits.in_float32(), launch(plain, steps).logits.in_float32()
        if len(expected):
            torch.testing.assert_close(logits, expected, atol=0.1 * float(expected.std()), rtol=0)
        assert_same_memory(replayed, plain, 0.1)
    assert capture.replays == 20


@pytest.mark.parametrize("shape", SHAPES)
def test_passes_at_real_widths_differ_by_rounding_only(shape: str) -> None:
    """A few layers, attention among states, and large passes, too: other tiles than those of tiny models."""
    layers = SHAPES[shape].layers[3:8]
    model = random_model(replace(SHAPES[shape], layers=layers, vocab_size=50_000), torch.bfloat16, "cuda")
    prompts, capture = Prompts(seed=3), Counted()
    plain, replayed = runner_around(model, "bfloat16"), runner_around(model, "bfloat16")
    replayed.capture_prefills(2048, MAX_TOKENS, capture)
    for n in range(18):
        steps = prompts.next_pass(num_rows=(16, 64, 300, 700, 1000, 2048)[n % 6])
        for ours, theirs in zip(pools(replayed), pools(plain), strict=True):
            ours.copy_(theirs)
        logits, expected = launch(replayed, steps).logits.in_float32(), launch(plain, steps).logits.in_float32()
        differences = (logits - expected).norm(dim=1) / expected.norm(dim=1)
        assert all(difference <= 0.05 for difference in differences.tolist()), differences
        if len(expected):  # one of 400,000 may be twice as far off by rounding as those of tiny models
            torch.testing.assert_close(logits, expected, atol=0.2 * float(expected.std()), rtol=0)
        assert_same_memory_by_norm(replayed, plain, 0.05)
    assert capture.replays == 18


@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_passes_at_real_widths_differ_by_rounding_only(shape: str) -> None:
    layers = SHAPES[shape].layers[3:8]
    model = random_model(replace(SHAPES[shape], layers=layers, vocab_size=50_000), torch.bfloat16, "cuda")
    prompts, capture = Prompts(seed=5), Counted()
    plain, replayed = runner_around(model, "bfloat16"), runner_around(model, "bfloat16")
    replayed.capture_decodes(40, MAX_TOKENS, capture)
    replayed.capture_prefills(2048, MAX_TOKENS, capture)
    replayed.capture_mixes(capture)
    for n in range(18):
        steps, replays = prompts.next_mix(num_rows=(60, 300, 1000, 2048)[n % 4]), capture.replays
        for ours, theirs in zip(pools(replayed), pools(plain), strict=True):
            ours.copy_(theirs)
        logits, expected = launch(replayed, steps).logits.in_float32(), launch(plain, steps).logits.in_float32()
        differences = (logits - expected).norm(dim=1) / expected.norm(dim=1)
        assert all(difference <= 0.05 for difference in differences.tolist()), differences
        assert_same_memory_by_norm(replayed, plain, 0.05)
        assert replays < capture.replays <= replays + 3  # chunks of more rows than mixed passes have are others


@pytest.mark.parametrize("in_one", [False, True], ids=["apart", "in one pass"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_beside_decodes_in_flight_changes_nobodys_tokens(family: str, in_one: bool, tiny_checkpoint) -> None:
    """Three sequences decode, each fed on the device from the launch before, while a fourth one prefills bit by bit."""
    path, answers, starts = tiny_checkpoint(family), [], (5, 40, 100)
    for replays in (False, True):
        runner, capture = runner_of(path, "float32", "float32"), Counted()
        first = [SequenceInput(random_prompt(n, seed=i), 0, blocks_of(i), None, i) for i, n in enumerate(starts)]
        said = [launch(runner, first)]
        if replays:
            runner.capture_decodes(8, MAX_TOKENS, capture)
            runner.capture_prefills(128, MAX_TOKENS, capture)
        if replays and in_one:
            runner.capture_mixes(capture)
        prompt, at = random_prompt(300), 0
        for n in range(12):
            steps = [SequenceInput((0,), s + n, blocks_of(i), i, i, future_token=i) for i, s in enumerate(starts)]
            if n % 3 != 2:  # a decode alone in between
                end = at + (7, 33, 16, 70)[n % 4]
                steps.append(SequenceInput(prompt[at:end], at, blocks_of(3), 3 if at else None, 3))
                at = end
            said.append(launch(runner, steps))
        answers.append([[token.id for token in each.drawn.tokens()] for each in said])
        assert capture.replays == (0 if not replays else 12 if in_one else 12 + 8)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("policy", ["branch", "every", "align"])
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_of_chats_get_the_answers_of_the_cpu(family: str, policy: str, tiny_checkpoint) -> None:
    """Each turn is all before it and a few tokens more; two chats at once, and a prompt that is asked again."""
    path, answers = tiny_checkpoint(family), []
    for device in ("cpu", "cuda"):
        built = small_engine(path, device=device, dtype="float32", checkpoint_policy=policy)
        chats = [random_prompt(150, seed=1), random_prompt(70, seed=2)]
        said: list[list[int]] = []
        for turn in range(4):
            runs: list[Run] = [submit(built, request(chat, GREEDY)) for chat in chats]
            serve(built, *runs)
            said += [run.tokens for run in runs]
            chats = [
                chat + run.tokens + random_prompt(9 + 20 * turn, seed=10 * turn + i)
                for i, (chat, run) in enumerate(zip(chats, runs, strict=True))
            ]
        said += [generate(built, request(chats[0], GREEDY)).tokens for _ in range(2)]
        run_all(built)
        assert_nothing_in_use(built)
        answers.append(said)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "drawn"])
def test_no_replayed_pass_waits_for_the_device(family: str, temperature: float, tiny_checkpoint) -> None:
    runner, capture = runner_of(tiny_checkpoint(family), "bfloat16", "bfloat16"), Counted()
    runner.capture_decodes(8, MAX_TOKENS, capture)
    runner.capture_prefills(128, MAX_TOKENS, capture)
    draw = GREEDY_DRAW._replace(sampling=Sampling(max_tokens=1, seed=1, temperature=temperature, top_p=0.9))
    prompt = random_prompt(100)
    alone = [SequenceInput(prompt[:40], 0, blocks_of(0), None, 0, ((16, 7), (32, 8)))]
    beside = [
        SequenceInput((0,), 40, blocks_of(0), 0, 0, future_token=0),
        SequenceInput(prompt[:90], 0, blocks_of(1), None, 1, ((48, 9),)),
    ]
    for _ in range(2):  # compiles what is new
        launched = [runner.launch(alone, [(0, draw)]), runner.launch(beside, [(0, draw), (1, draw)])]
    torch.cuda.synchronize()
    replays = capture.replays
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = [runner.launch(alone, [(0, draw)]), runner.launch(beside, [(0, draw), (1, draw)])]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(each.drawn.tokens()) for each in launched] == [1, 2]
    assert capture.replays == replays + 3


def test_a_pass_that_writes_too_many_states_is_launched_kernel_by_kernel(tiny_checkpoint) -> None:
    runner, capture = runner_of(tiny_checkpoint("granite"), "float32", "float32"), Counted()
    runner.capture_prefills(256, MAX_TOKENS, capture)
    prompt = random_prompt(200)
    emit = tuple((BLOCK_SIZE // 2 * (i + 1), i + 1) for i in range(MOST_WRITES))
    launch(runner, [SequenceInput(prompt, 0, blocks_of(0), None, 0, emit)])
    assert capture.replays == 0
    assert all(pools.rec[: MOST_WRITES + 1].isfinite().all() for pools in runner.memory.states)
