"""Multi-token-prediction layers against an oracle of transformers' layers, float32 on CPU."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.forward.sequence_input import SequenceInput
from headrace.models.config import ModelError, NoMtpLayer
from headrace.models.weights import load_model, random_model
from tests.support.engine.drafting import BLOCK_SIZE, Drafting, Newest
from tests.support.engine.mtp_checkpoints import MtpOracle, add_mtp

FAMILIES = ("nemotron_h_moe", "qwen35", "qwen35_moe", "qwen3_next")
TOLERANCE = 1e-4
BLOCKS_A = [9, 3, 17, 28, 5, 11, 30]  # 7 * 16 = 112 tokens, out of order
BLOCKS_B = [8, 2, 16, 27, 4, 10, 29]
BLOCKS_C = [7]


@pytest.fixture(scope="module")
def checkpoint(load_family, tmp_path_factory: pytest.TempPathFactory):
    """A family's checkpoint with an MTP layer in it, and the oracle."""
    made: dict[str, tuple[Path, MtpOracle]] = {}

    def get(name: str) -> tuple[Path, MtpOracle]:
        if name not in made:
            path = Path(shutil.copytree(load_family(name).path, tmp_path_factory.mktemp("mtp") / name))
            made[name] = path, add_mtp(path, seed=5, is_stacked=name != "qwen3_next")
        return made[name]

    return get


@pytest.fixture(params=FAMILIES)
def drafting(request: pytest.FixtureRequest, checkpoint) -> tuple[Drafting, MtpOracle]:
    path, oracle = checkpoint(request.param)
    return Drafting.of(load_model(path, with_mtp=True)), oracle


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("length", "cuts"), [(1, ()), (2, ()), (40, ()), (80, (16, 33)), (80, (1, 2, 79))])
def test_four_drafts_after_a_prompt(drafting, prompt, length: int, cuts: tuple[int, ...]):
    ours, oracle = drafting
    tokens = prompt(length)
    ours.prefill(tokens, BLOCKS_A, 0, *cuts)
    logits = ours.drafts(Newest(77, length, BLOCKS_A, 0), num_drafts=4)
    assert_close(logits[0], oracle.draft_logits([*tokens, 77], 4))
    assert len(set(logits[0].argmax(-1).tolist())) > 1


def test_sequences_of_one_step_keep_their_vectors(drafting, prompt):
    """Decodes and prefills side by side, with all three counts of logits; drafts of all together."""
    ours, oracle = drafting
    a, b, c = prompt(60, 1), prompt(40, 2), prompt(3, 3)
    ours.prefill(a[:58], BLOCKS_A, 0)
    ours.prefill(b[:20], BLOCKS_B, 1)
    logits = ours.step(
        SequenceInput(a[58:59], 58, BLOCKS_A, 0, 3),
        SequenceInput(b[20:], 20, BLOCKS_B, 1, 1, num_logits=20),
        SequenceInput(c, 0, BLOCKS_C, None, 2, num_logits=0),
    )
    assert_close(logits, torch.cat((oracle.logits(a[:59])[58:], oracle.logits(b)[20:])))
    ours.step(SequenceInput(a[59:], 59, BLOCKS_A, 3, 0))
    logits = ours.drafts(
        Newest(9, 60, BLOCKS_A, 0), Newest(11, 40, BLOCKS_B, 1), Newest(13, 3, BLOCKS_C, 2), num_drafts=3
    )
    expected = [oracle.draft_logits(tokens, 3) for tokens in ([*a, 9], [*b, 11], [*c, 13])]
    assert_close(logits, torch.stack(expected))


def test_rejected_drafts_are_overwritten(drafting, prompt):
    ours, oracle = drafting
    tokens, after = prompt(30, 1), prompt(5, 2)
    ours.prefill(tokens, BLOCKS_A, 0)
    ours.drafts(Newest(7, 30, BLOCKS_A, 0), num_drafts=4)
    answered = [*tokens, *after]  # other tokens than the drafts
    ours.prefill(answered, BLOCKS_A, 0, start=30)
    logits = ours.drafts(Newest(8, 35, BLOCKS_A, 0), num_drafts=3)
    assert_close(logits[0], oracle.draft_logits([*answered, 8], 3))


def test_a_hit_on_a_published_prefix_drafts_as_its_own_computation_would(drafting, prompt):
    """Blocks and checkpoint of another prompt, which went on otherwise."""
    ours, oracle = drafting
    prefix, one, other = prompt(32, 1), prompt(20, 2), prompt(20, 3)
    ours.step(SequenceInput([*prefix, *one], 0, BLOCKS_A, None, 0, emit=((16, 2), (32, 3))))
    tokens, blocks = [*prefix, *other], [*BLOCKS_A[:2], *BLOCKS_B[2:]]
    ours.step(SequenceInput(tokens[32:], 32, blocks, 3, 1))
    logits = ours.drafts(Newest(6, 52, blocks, 1), num_drafts=3)
    assert_close(logits[0], oracle.draft_logits([*tokens, 6], 3))
    at_once = ours.drafts(Newest(other[0], 32, blocks, 3), num_drafts=1)
    assert_close(at_once[0], oracle.draft_logits(tokens[:33], 1))


def test_entries_of_a_block_depend_on_no_token_behind_it(drafting, prompt):
    ours, _ = drafting
    prefix, one, other = prompt(32, 1), prompt(20, 2), prompt(20, 3)
    ours.prefill([*prefix, *one], BLOCKS_A, 0)
    ours.prefill([*prefix, *other], BLOCKS_B, 1)
    entries = [ours.entries(blocks[:2])[:, 1:] for blocks in (BLOCKS_A, BLOCKS_B)]
    torch.testing.assert_close(*entries, atol=TOLERANCE, rtol=0)


def test_drafting_goes_on_where_blocks_and_state_arrive(drafting, prompt):
    """A hand-over, a fetch and a move are this copy: the first draft after it is that of the source."""
    source, oracle = drafting
    tokens = prompt(45)
    source.prefill(tokens, BLOCKS_A, 0)
    here = Drafting.of(source.model)
    layout = source.memory.layout
    blocks, state = (torch.empty(size, dtype=torch.uint8) for size in (3 * layout.block_bytes, layout.state_bytes))
    source.memory.gather_prompt(BLOCKS_A, BLOCK_SIZE, 0, 3, blocks)
    source.memory.gather_state(0, state)
    here.memory.scatter_blocks(BLOCKS_B[:3], blocks)
    here.memory.scatter_state(2, state)
    logits = here.drafts(Newest(7, 45, BLOCKS_B, 2), num_drafts=3)
    assert torch.equal(logits, source.drafts(Newest(7, 45, BLOCKS_A, 0), num_drafts=3))
    assert_close(logits[0], oracle.draft_logits([*tokens, 7], 3))


def test_what_lies_at_position_0_is_never_read(drafting, prompt):
    ours, oracle = drafting
    long, short = prompt(40, 1), prompt(1, 2)
    ours.prefill(long, BLOCKS_A, 0)
    ours.prefill(short, BLOCKS_B, 1)
    for blocks in (BLOCKS_A, BLOCKS_B):
        ours.memory.attention[-1][blocks[0], 0, :, 0] = float("nan")
    logits = ours.drafts(Newest(9, 40, BLOCKS_A, 0), Newest(11, 1, BLOCKS_B, 1), num_drafts=2)
    assert_close(logits, torch.stack((oracle.draft_logits([*long, 9], 2), oracle.draft_logits([*short, 11], 2))))


def test_a_lost_vector_shows(drafting, prompt):
    """The tests above can fail: without the last token's vector, drafts are far off."""
    ours, oracle = drafting
    tokens = prompt(40)
    ours.prefill(tokens, BLOCKS_A, 0)
    ours.memory.states[-1].conv[0] = 0
    logits = ours.drafts(Newest(7, 40, BLOCKS_A, 0), num_drafts=1)
    assert (logits[0] - oracle.draft_logits([*tokens, 7], 1)).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_without_it_the_model_is_as_if_the_checkpoint_had_none(name: str, checkpoint, load_family):
    path, _ = checkpoint(name)
    model = load_model(path)
    assert model.mtp is None
    layout = model.cache_layout(BLOCK_SIZE)
    assert replace(layout, fingerprint="") == replace(load_family(name).model.cache_layout(BLOCK_SIZE), fingerprint="")


def test_nodes_of_which_one_drafts_do_not_exchange_blocks(checkpoint):
    path, _ = checkpoint("qwen35")
    drafting, plain = load_model(path, with_mtp=True), load_model(path)
    difference = plain.cache_layout(BLOCK_SIZE).mismatch(drafting.cache_layout(BLOCK_SIZE))
    assert difference == "1 attention groups != 2"


def test_a_checkpoint_without_the_layer_is_refused_by_name(load_family):
    with pytest.raises(NoMtpLayer, match=r"no tensor's name begins with mtp\."):
        load_model(load_family("qwen35").path, with_mtp=True)


def test_a_family_without_the_layer_is_refused(load_family):
    with pytest.raises(NoMtpLayer, match="models of GraniteMoeHybridForCausalLM have no MTP layer"):
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
    ours.prefill(prompt(20), BLOCKS_A, 0)
    assert ours.drafts(Newest(7, 20, BLOCKS_A, 0), num_drafts=2).isfinite().all()
