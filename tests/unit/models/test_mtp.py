"""Multi-token-prediction layers against an oracle of transformers' layers, float32 on CPU."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.forward.forward_batch import ForwardBatch
from headrace.forward.memory import CacheMemory
from headrace.forward.sequence_input import SequenceInput
from headrace.models.config import ModelError, UnsupportedModel
from headrace.models.model import HybridModel
from headrace.models.weights import load_model, random_model
from tests.support.engine.mtp_checkpoints import MtpOracle, add_mtp

FAMILIES = ("qwen35", "qwen35_moe", "qwen3_next")
TOLERANCE = 1e-4
BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 16, 32, 4
BLOCKS_A = [9, 3, 17, 28, 5, 11, 30]  # 7 * 16 = 112 tokens, out of order
BLOCKS_B = [8, 2, 16, 27, 4, 10, 29]


@dataclass
class Drafting:
    """A model with its MTP layer over memory of its own, which is all NaN until it is written."""

    model: HybridModel
    memory: CacheMemory

    @classmethod
    def of(cls, model: HybridModel) -> "Drafting":
        memory = CacheMemory(model.cache_layout(BLOCK_SIZE), NUM_BLOCKS, NUM_SLOTS)
        for pool in memory.pools:
            pool.fill_(float("nan"))
        return cls(model, memory)

    @torch.inference_mode()
    def prefill(self, tokens: list[int], blocks: Sequence[int], slot: int, *cuts: int) -> Tensor:
        """The last token's vector, after chunks that end at `cuts` and at the end."""
        last = torch.zeros(1, self.model.config.hidden_size)
        for start, end in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
            source = slot if start else None
            chunk = SequenceInput(tokens[start:end], start, blocks, source, slot, num_logits=end - start)
            batch = ForwardBatch.build([chunk], BLOCK_SIZE, self.model.device)
            hidden = self.model.hidden(batch, self.memory)
            self.model.store_for_drafts(batch, self.memory, torch.cat((last, hidden[:-1])))
            last = hidden[-1:]
        return last

    @torch.inference_mode()
    def drafts(self, rows: list[tuple[int, int, Sequence[int]]], hidden: Tensor, num_drafts: int) -> Tensor:
        """Logits [sequences, num_drafts, V] after `rows`: each sequence's newest token, its position, its blocks.

        hidden   [sequences, hidden]: vectors of the tokens before
        """
        tokens, logits = [token for token, _, _ in rows], []
        for ahead in range(num_drafts):
            inputs = [
                SequenceInput([token], position + ahead, blocks, slot, slot)
                for slot, (token, (_, position, blocks)) in enumerate(zip(tokens, rows, strict=True))
            ]
            batch = ForwardBatch.build(inputs, BLOCK_SIZE, self.model.device)
            hidden = self.model.draft_hidden(batch, self.memory, hidden)
            logits.append(self.model.logits(hidden))
            tokens = logits[-1].argmax(-1).tolist()
        return torch.stack(logits, dim=1)

    def entries(self, blocks: Sequence[int]) -> Tensor:
        """The MTP layer's keys and values in these blocks: [2, tokens, KV heads, head dim]."""
        return self.memory.attention[-1][list(blocks), 0].transpose(0, 1).flatten(1, 2)


@pytest.fixture(scope="module")
def checkpoint(load_family, tmp_path_factory: pytest.TempPathFactory):
    """A family's checkpoint with an MTP layer in it, and the oracle."""
    made: dict[str, tuple[Path, MtpOracle]] = {}

    def get(name: str) -> tuple[Path, MtpOracle]:
        if name not in made:
            path = Path(shutil.copytree(load_family(name).path, tmp_path_factory.mktemp("mtp") / name))
            made[name] = path, add_mtp(path, name, seed=5, is_stacked=name != "qwen3_next")
        return made[name]

    return get


@pytest.fixture(params=FAMILIES)
def drafting(request: pytest.FixtureRequest, checkpoint) -> tuple[Drafting, MtpOracle]:
    path, oracle = checkpoint(request.param)
    return Drafting.of(load_model(path, with_mtp=True)), oracle


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("length", "cuts"), [(1, ()), (2, ()), (40, ()), (80, (16, 33)), (80, (1, 79))])
def test_four_drafts_after_a_prompt(drafting, prompt, length: int, cuts: tuple[int, ...]):
    ours, oracle = drafting
    tokens, newest = prompt(length), 77
    hidden = ours.prefill(tokens, BLOCKS_A, 0, *cuts)
    logits = ours.drafts([(newest, length, BLOCKS_A)], hidden, 4)
    assert_close(logits[0], oracle.draft_logits([*tokens, newest], 4))
    assert len(set(logits[0].argmax(-1).tolist())) > 1


def test_sequences_of_unequal_lengths_draft_together(drafting, prompt):
    ours, oracle = drafting
    long, short = prompt(70, 1), prompt(18, 2)
    hidden = torch.cat((ours.prefill(long, BLOCKS_A, 0), ours.prefill(short, BLOCKS_B, 1)))
    logits = ours.drafts([(9, 70, BLOCKS_A), (11, 18, BLOCKS_B)], hidden, 3)
    assert_close(logits, torch.stack((oracle.draft_logits([*long, 9], 3), oracle.draft_logits([*short, 11], 3))))


def test_rejected_drafts_are_overwritten(drafting, prompt):
    ours, oracle = drafting
    tokens, after = prompt(30, 1), prompt(5, 2)
    hidden = ours.prefill(tokens, BLOCKS_A, 0)
    ours.drafts([(7, 30, BLOCKS_A)], hidden, 4)
    answered = [*tokens, *after]  # other tokens than the drafts
    hidden = ours.prefill(answered, BLOCKS_A, 0, 30)
    assert_close(ours.drafts([(8, 35, BLOCKS_A)], hidden, 3)[0], oracle.draft_logits([*answered, 8], 3))


def test_entries_of_a_block_depend_on_no_token_behind_it(drafting, prompt):
    """A block that is published for its prefix serves prompts that go on otherwise."""
    ours, oracle = drafting
    prefix, one, other = prompt(32, 1), prompt(20, 2), prompt(20, 3)
    ours.prefill([*prefix, *one], BLOCKS_A, 0, 32)
    ours.prefill([*prefix, *other], BLOCKS_B, 1, 32)
    assert torch.equal(ours.entries(BLOCKS_A[:2])[:, 1:], ours.entries(BLOCKS_B[:2])[:, 1:])
    hidden = ours.prefill([*prefix, *other], [*BLOCKS_A[:2], *BLOCKS_B[2:]], 2, 32)
    logits = ours.drafts([(6, 52, [*BLOCKS_A[:2], *BLOCKS_B[2:]])], hidden, 2)
    assert_close(logits[0], oracle.draft_logits([*prefix, *other, 6], 2))


def test_what_lies_at_position_0_is_never_read(drafting, prompt):
    ours, oracle = drafting
    long, short = prompt(40, 1), prompt(1, 2)
    hidden = torch.cat((ours.prefill(long, BLOCKS_A, 0), ours.prefill(short, BLOCKS_B, 1)))
    for blocks in (BLOCKS_A, BLOCKS_B):
        ours.memory.attention[-1][blocks[0], 0, :, 0] = float("nan")
    logits = ours.drafts([(9, 40, BLOCKS_A), (11, 1, BLOCKS_B)], hidden, 2)
    assert_close(logits, torch.stack((oracle.draft_logits([*long, 9], 2), oracle.draft_logits([*short, 11], 2))))


def test_another_hidden_vector_shows(drafting, prompt):
    """The tests above can fail: with a vector that is not the last token's, drafts are far off."""
    ours, oracle = drafting
    tokens = prompt(40)
    ours.prefill(tokens, BLOCKS_A, 0)
    logits = ours.drafts([(7, 40, BLOCKS_A)], torch.zeros(1, ours.model.config.hidden_size), 1)
    assert (logits[0] - oracle.draft_logits([*tokens, 7], 1)).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_without_it_the_model_is_as_if_the_checkpoint_had_none(name: str, checkpoint, load_family):
    path, _ = checkpoint(name)
    model = load_model(path)
    assert model.mtp is None
    layout = model.cache_layout(BLOCK_SIZE)
    assert replace(layout, fingerprint="") == replace(load_family(name).model.cache_layout(BLOCK_SIZE), fingerprint="")
    with pytest.raises(ValueError, match="with_mtp"):
        model.store_for_drafts(*([None] * 3))


def test_nodes_of_which_one_drafts_do_not_exchange_blocks(checkpoint):
    path, _ = checkpoint("qwen35")
    drafting, plain = load_model(path, with_mtp=True), load_model(path)
    difference = plain.cache_layout(BLOCK_SIZE).mismatch(drafting.cache_layout(BLOCK_SIZE))
    assert difference == "1 attention groups != 2"


def test_a_checkpoint_without_the_layer_is_refused_by_name(load_family):
    with pytest.raises(ModelError, match=r"mtp\.layers\.0"):
        load_model(load_family("qwen35").path, with_mtp=True)


def test_a_family_without_the_layer_is_refused(load_family):
    with pytest.raises(UnsupportedModel, match="no MTP layer"):
        load_model(load_family("granite").path, with_mtp=True)


@pytest.mark.parametrize("name", ["mtp.layers.1.input_layernorm.weight", "mtp.embed_tokens.weight"])
def test_a_second_layer_or_an_own_embedding_is_refused_by_name(name: str, checkpoint, tmp_path: Path):
    path, _ = checkpoint("qwen35")
    folder = Path(shutil.copytree(path, tmp_path / "more"))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load_model(folder, with_mtp=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_random_weights_draft_too(name: str, load_family, prompt):
    ours = Drafting.of(random_model(load_family(name).model.config, with_mtp=True))
    hidden = ours.prefill(prompt(20), BLOCKS_A, 0)
    assert ours.drafts([(7, 20, BLOCKS_A)], hidden, 2).isfinite().all()
