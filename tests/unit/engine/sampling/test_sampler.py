from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headrace.cache.tails import BehindCheck
from headrace.engine.sampling import sampler
from headrace.engine.sampling.draw import Draw
from headrace.engine.sampling.sampler import Drawn, choose, pending_bans
from headrace.engine.sampling.token_biases import TokenBiases
from headrace.engine.sampling.token_counts import TokenCounts
from headrace.kernels.sampling.widen import widened_torch
from headrace.models import logits as models_logits
from headrace.models.logits import Logits
from headrace.request import Sampling, Token

RANDOM = Sampling(max_tokens=1, seed=0)
VOCAB = 50


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def sample(
    lines: torch.Tensor,
    draws: list[Draw],
    counts: TokenCounts | None = None,
    biases: TokenBiases | None = None,
    before: Sequence[int] = (),
) -> list[Token]:
    """One token for each row, after a launch that drew `before`."""
    bans = pending_bans(draws, torch.tensor(before, dtype=torch.int64), VOCAB)
    return tokens_of(Logits(lines, 1.0), draws, counts or no_counts(), biases or no_biases(), bans)


def tokens_of(logits: Logits, draws: list[Draw], *rest) -> list[Token]:
    return Drawn(logits, choose(logits, draws, *rest), draws).tokens()


def no_counts() -> TokenCounts:
    return TokenCounts(VOCAB, torch.device("cpu"))


def no_biases() -> TokenBiases:
    return TokenBiases(VOCAB, torch.device("cpu"))


def sample_after(line: torch.Tensor, sampling: Sampling, prompt: list[int], answer: Sequence[int] = ()) -> int:
    """The token after these."""
    counts = no_counts()
    row = counts.row("the sequence", [*prompt, *answer], len(prompt))
    return sample(line, [Draw(sampling, len(prompt) + len(answer), counts_row=row)], counts)[0].id


def draws(sampling: Sampling, count: int) -> list[Draw]:
    """The same request at `count` seeds."""
    return [Draw(replace(sampling, seed=seed), 3) for seed in range(count)]


def frequencies(line: torch.Tensor, sampling: Sampling, count: int = 4000) -> torch.Tensor:
    tokens = sample(line.expand(count, -1), draws(sampling, count))
    counts = Counter(token.id for token in tokens)
    return torch.tensor([counts[i] / count for i in range(VOCAB)])


def test_zero_temperature_takes_the_largest_logit() -> None:
    lines = logits(5)
    tokens = sample(lines, draws(replace(RANDOM, temperature=0.0), 5))
    assert [token.id for token in tokens] == lines.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (replace(RANDOM, temperature=0.7), TemperatureLogitsWarper(0.7)),
        (replace(RANDOM, top_k=5), TopKLogitsWarper(5)),
        (replace(RANDOM, top_p=0.6), TopPLogitsWarper(0.6)),
        (replace(RANDOM, min_p=0.1), MinPLogitsWarper(0.1)),
    ],
)
def test_draws_follow_the_distribution_that_transformers_samples_from(sampling, warper) -> None:
    line = logits()
    expected = torch.softmax(warper(torch.tensor([[1, 2, 3]]), line.clone()), -1)[0]
    seen = frequencies(line, sampling)
    assert (seen[expected == 0] == 0).all()
    # Four standard deviations of 4,000 draws for the most uncertain token.
    assert (seen - expected).abs().max() < 4 * 0.5 / 4000**0.5


@pytest.mark.parametrize("temperature", [1e-310, 1e-9, 1e-5])
def test_a_tiny_temperature_takes_the_largest_logit(temperature: float) -> None:
    lines = logits(5)
    tokens = sample(lines, draws(replace(RANDOM, temperature=temperature), 5))
    assert [token.id for token in tokens] == lines.argmax(-1).tolist()


def test_top_p_keeps_the_first_token_even_when_it_alone_exceeds_it() -> None:
    line = torch.zeros(1, VOCAB)
    line[0, 7] = 10.0
    assert {t.id for t in sample(line.expand(50, -1), draws(replace(RANDOM, top_p=0.01), 50))} == {7}


def test_a_draw_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    lines, mixed = logits(6), []
    for row in range(6):
        sampling = replace(RANDOM, seed=row, temperature=0.5 + row / 5, top_k=row * 7, top_p=1 - row / 20)
        mixed.append(Draw(sampling, row + 1))
    together = [token.id for token in sample(lines, mixed)]
    alone = [sample(lines[row : row + 1], [draw])[0].id for row, draw in enumerate(mixed)]
    assert together == alone


def test_a_ban_after_a_pending_token_holds_if_it_was_drawn() -> None:
    lines = logits(1).expand(2, -1)
    best, second = lines[0].topk(2).indices.tolist()
    greedy = Draw(replace(RANDOM, temperature=0.0), 3, banned_after=((7, best), (8, second)), pending=1)
    chosen = [sample(lines, [greedy, greedy._replace(pending=0)], before=[3, before])[0].id for before in (7, 8, 9)]
    assert chosen == [second, best, best]
    assert not greedy.is_greedy


def test_repetition_penalty_is_that_of_transformers() -> None:
    line, seen = logits(), [3, 3, 9, 20]
    greedy = replace(RANDOM, temperature=0.0, repetition_penalty=1.7)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([seen]), line.clone()).argmax()
    best = int(line.argmax())
    assert sample_after(line, greedy, seen[:2], seen[2:]) == int(expected)
    assert sample_after(line, replace(greedy, repetition_penalty=9.0), seen, [best]) != best


@pytest.mark.parametrize("split", [0, 2, 5])
def test_penalised_logits_are_those_of_the_definitions_bit_for_bit(split: int) -> None:
    """The definitions read all tokens for each draw; here they are counted once and then advanced by each draw."""
    line, tokens = logits(), [3, 3, 9, 20, 9]
    settings = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.2, "temperature": 0.0}
    counts = no_counts()
    row = counts.row("the sequence", tokens[:split], split)
    for length in range(split, 25):
        if length < len(tokens):  # the next token is given: as if it had been drawn
            counts.advance(torch.tensor([row]), torch.tensor([tokens[length]]))
            continue
        expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens[:length]]), line.clone())
        for token, count in Counter(tokens[split:length]).items():
            expected[0, token] -= 0.7 + 0.2 * count
        (token,) = sample(line, [Draw(replace(RANDOM, **settings), length, counts_row=row)], counts)
        assert token.id == int(expected.argmax())
        tokens.append(token.id)
    assert len(set(tokens)) > 6


def test_each_penalised_row_has_its_own_counts_and_others_are_left_alone() -> None:
    line, counts = logits(), no_counts()
    best = int(line.argmax())
    greedy = replace(RANDOM, temperature=0.0)
    harsh = replace(greedy, presence_penalty=2.0, repetition_penalty=9.0)
    rows = {name: counts.row(name, [best if name == "saw it" else (best + 1) % VOCAB], 0) for name in ("saw it", "not")}
    drawn = [Draw(greedy, 1), Draw(harsh, 1, counts_row=rows["saw it"]), Draw(harsh, 1, counts_row=rows["not"])]
    ids = [token.id for token in sample(line.expand(3, -1), drawn, counts)]
    assert ids[0] == ids[2] == best != ids[1]


def test_a_draw_uploads_no_more_after_many_tokens_than_after_few(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    for name in ("upload_values", "upload_lists"):
        upload = getattr(sampler, name)

        def counted(values, *args, upload=upload):
            sizes.append(int(torch.tensor(values).numel()))
            return upload(values, *args)

        monkeypatch.setattr(sampler, name, counted)
    uploaded = []
    for length in (10, 100_000):
        counts = no_counts()
        row = counts.row("the sequence", [7] * length, 5)
        sizes.clear()
        sampling = replace(RANDOM, repetition_penalty=1.1, presence_penalty=1.0)
        choose(Logits(logits(), 1.0), [Draw(sampling, length, banned=(4,), counts_row=row)], counts, no_biases())
        uploaded.append(sum(sizes))
    assert uploaded[0] == uploaded[1] > 0
    types = ("Sampling", "int", "int | None", "Sequence[int]", "Sequence[tuple[int, int]]", "BehindCheck | None")
    assert all(kind.__forward_arg__ in types for kind in Draw.__annotations__.values())


def test_presence_and_frequency_penalties_count_the_answer_only() -> None:
    line = torch.zeros(1, VOCAB)
    line[0, 5], line[0, 6] = 2.0, 1.0
    greedy = replace(RANDOM, temperature=0.0)
    assert sample_after(line, replace(greedy, presence_penalty=1.5), [5, 5]) == 5
    assert sample_after(line, replace(greedy, presence_penalty=1.5), [1], [5]) == 6
    assert sample_after(line, replace(greedy, frequency_penalty=0.6), [1], [5]) == 5
    assert sample_after(line, replace(greedy, frequency_penalty=0.6), [1], [5, 5]) == 6


def test_banned_tokens_never_come() -> None:
    line = logits()
    best = int(line.argmax())
    draw = Draw(replace(RANDOM, temperature=0.0), 1, banned=(best,))
    assert sample(line, [draw])[0].id == int(line[0].topk(2).indices[1])
    assert frequencies(line, RANDOM)[best] > 0
    drawn = sample(line.expand(200, -1), [d._replace(banned=(best,)) for d in draws(RANDOM, 200)])
    assert best not in {token.id for token in drawn}


def test_logprobs_are_the_models_own_before_temperature_and_penalties() -> None:
    line = logits()
    expected = torch.log_softmax(line[0].double(), -1)
    sampling = replace(RANDOM, temperature=0.0, logprobs=3, repetition_penalty=2.0)
    counts = no_counts()
    (token,) = sample(line, [Draw(sampling, 2, counts_row=counts.row("r", [1, 2], 2))], counts)
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[token.id]))
    assert [a.id for a in token.logprobs.top] == expected.topk(3).indices.tolist()
    assert sample(line, [Draw(replace(RANDOM, logprobs=0), 1)])[0].logprobs.top == ()
    assert sample(line, [Draw(RANDOM, 1)])[0].logprobs is None


def test_sampling_leaves_the_logits_as_they_were() -> None:
    line = logits()
    before = line.clone()
    sample_after(line, replace(RANDOM, repetition_penalty=2.0, presence_penalty=1.0), [1], [2, 3])
    sample(line, [Draw(RANDOM, 1, banned=(4,))])
    assert torch.equal(line, before)


def test_rows_of_a_bfloat16_head_are_drawn_from_as_their_logits_in_float32() -> None:
    """Greedy, random, banned, masked and penalised draws side by side, all with logprobs."""
    rows = logits(6).bfloat16()
    rows[0, [7, 9]] = rows[0].max() + 1  # a tie: the first of them
    best = rows[4:].argmax(-1).tolist()
    greedy, hot = (replace(RANDOM, temperature=t, logprobs=3) for t in (0.0, 1.5))
    harsh = replace(greedy, repetition_penalty=9.0)
    outcomes = []
    for each in (Logits(rows, 6.0), Logits(rows.float() / 6.0, 1.0)):
        counts = no_counts()
        mixed = [
            Draw(greedy, 1),
            Draw(hot, 2, banned_after=((3, 5),), pending=0),
            Draw(greedy, 3, banned=(int(rows[2].argmax()),)),
            Draw(hot, 4, mask_row=0),
            Draw(greedy, 5, banned_after=((3, best[0]),), pending=0),
            Draw(harsh, 6, counts_row=counts.row("harsh", [best[1]], 1)),
        ]
        bans = pending_bans(mixed, torch.tensor([3]), VOCAB)
        masks = torch.tensor([[1 << 11 | 1 << 12, 0]], dtype=torch.int32)
        outcomes.append((tokens_of(each, mixed, counts, no_biases(), bans, masks), counts.values.tolist()))
    assert outcomes[0] == outcomes[1]
    ids = [token.id for token in outcomes[0][0]]
    assert ids[0] == 7 and ids[3] in (11, 12) and ids[2] != int(rows[2].argmax())
    assert ids[4] != best[0] and ids[5] != best[1]


def test_only_rows_whose_draws_need_float32_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    widened: list[list[int] | None] = []

    def noted(rows, divisor, index=None):
        widened.append(None if index is None else index.tolist())
        return widened_torch(rows, divisor, index)

    monkeypatch.setattr(models_logits, "widened", noted)
    each, rows = Logits(logits(3).bfloat16(), 6.0), (no_counts(), no_biases())
    greedy = Draw(replace(RANDOM, temperature=0.0), 1)
    tokens_of(each, [greedy] * 3, *rows)
    assert not widened
    tokens_of(each, [greedy, Draw(RANDOM, 1), greedy._replace(banned=(3,))], *rows)
    assert widened == [[1, 2]]
    tokens_of(each, [greedy, greedy, Draw(replace(greedy.sampling, logprobs=2), 1)], *rows)
    assert widened == [[1, 2], [2]]


def test_a_draw_behind_a_check_has_the_number_of_the_position_that_it_turns_out_to_have() -> None:
    line, num_accepted = Logits(torch.randn(3, 500), 1.0), torch.tensor([9, 2, 0, 1])
    least = [
        Draw(replace(RANDOM, seed=1), 20, behind=BehindCheck(1, 3, None, 0)),
        Draw(replace(RANDOM, seed=2), 30, behind=BehindCheck(3, 1, None, 0)),
        Draw(replace(RANDOM, seed=3), 40),
    ]
    at_least = [draw._replace(behind=None) for draw in least]
    known = [draw._replace(position=draw.position + n) for draw, n in zip(at_least, (2, 1, 0), strict=True)]
    ids, rows = choose(line, least, no_counts(), no_biases(), num_accepted=num_accepted), (no_counts(), no_biases())
    assert ids.tolist() == choose(line, known, *rows).tolist() != choose(line, at_least, *rows).tolist()
