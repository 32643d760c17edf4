"""Loading a model: picks the family by architecture, reads the config, loads the tensors."""

from pathlib import Path

import torch

from headrace.kernels.attention.rotary import inverse_frequencies
from headrace.kernels.dense.linear import LinearWeight
from headrace.models.branches import BranchChain
from headrace.models.config import ModelConfig, ModelError, NoMtpLayer, UnsupportedModel
from headrace.models.draft_head import DraftHead
from headrace.models.families.falcon_h1 import FALCON_H1
from headrace.models.families.granite import BAMBA, GRANITE
from headrace.models.families.jamba import JAMBA
from headrace.models.families.kimi_linear import KIMI_LINEAR
from headrace.models.families.lfm2 import LFM2
from headrace.models.families.nemotron_h import NEMOTRON_H
from headrace.models.families.olmo_hybrid import OLMO_HYBRID
from headrace.models.families.qwen import QWEN
from headrace.models.gpu_limits import check_gpu
from headrace.models.model import Family, HybridModel
from headrace.models.quantisation import QuantisedAtLoad, QuantisedFiles, is_quantised, quantised_fingerprint
from headrace.models.random_weights import RandomWeights, random_fingerprint
from headrace.models.raw_config import RawConfig
from headrace.models.weight_files import WeightFiles, WeightSource, fingerprint

FAMILIES: dict[str, Family] = {
    "BambaForCausalLM": BAMBA,
    "FalconH1ForCausalLM": FALCON_H1,
    "GraniteMoeHybridForCausalLM": GRANITE,
    "JambaForCausalLM": JAMBA,
    "KimiLinearForCausalLM": KIMI_LINEAR,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2,
    "NemotronHForCausalLM": NEMOTRON_H,
    "OlmoHybridForCausalLM": OLMO_HYBRID,
    "Qwen3NextForCausalLM": QWEN,
    "Qwen3_5ForCausalLM": QWEN,
    "Qwen3_5ForConditionalGeneration": QWEN,  # its text model
    "Qwen3_5MoeForCausalLM": QWEN,
    "Qwen3_5MoeForConditionalGeneration": QWEN,
}

# Hub checkpoints of the multimodal wrappers keep the text model one level deeper, Nemotron's elsewhere.
BASE_PREFIXES = ("model.language_model.", "backbone.", "model.")


def load_config(path: str | Path) -> ModelConfig:
    """The model's config, without reading weights. Raises UnsupportedModel, ModelError."""
    _, config, _ = _read(Path(path))
    return config


MTP_PREFIX = "mtp."  # of a multi-token-prediction layer, in all families that have one


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    with_mtp: bool = False,
    draft_vocabulary: int = 0,
    quantization: str | None = None,
) -> HybridModel:
    """The model in `path` (config.json and safetensors), cast to `dtype`, on `device`.

    with_mtp           also its MTP layer, which then has its place in each block; otherwise the layer is not read
    draft_vocabulary   tokens that the layer chooses from at a time; 0: all
    quantization       fp8: matrices are quantised as they are read. None: they stay as they are stored

    Raises UnsupportedModel for an architecture or option that is not implemented, NoMtpLayer if there is none to load,
    ModelError for missing, misshapen or unexpected tensors, by name.
    """
    path = Path(path)
    family, config, quantised = _read(path)
    if quantised and quantization is not None:
        raise ModelError(f"{path} is in FP8 already, but for what its recipe leaves out: leave quantization out")
    if torch.device(device).type == "cuda":
        check_gpu(config)
    weights = (QuantisedFiles if quantised else WeightFiles)(path, dtype, torch.device(device))
    weights.skip(*family.skipped)
    if not with_mtp:
        weights.skip(MTP_PREFIX)
    elif family.load_mtp is not None and not any(name.startswith(MTP_PREFIX) for name in weights.remaining):
        raise NoMtpLayer(f"{path} has no MTP layer: no tensor's name begins with {MTP_PREFIX}")
    return _assemble(
        family, config, weights, fingerprint(path, config.canonical()), with_mtp, draft_vocabulary, quantization
    )


def random_model(
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    with_mtp: bool = False,
    draft_vocabulary: int = 0,
    quantization: str | None = None,
) -> HybridModel:
    """A model of that shape with random weights, made on `device`; reads no file."""
    made_on = torch.device(device)
    if made_on.type == "cuda":
        check_gpu(config)
    identity = random_fingerprint(config.canonical(), made_on)
    weights = RandomWeights(dtype, made_on)
    return _assemble(FAMILIES[config.architecture], config, weights, identity, with_mtp, draft_vocabulary, quantization)


def _assemble(
    family: Family,
    config: ModelConfig,
    weights: WeightSource,
    fingerprint: str,
    with_mtp: bool,
    draft_vocabulary: int,
    quantization: str | None,
) -> HybridModel:
    if quantization is not None:
        weights, fingerprint = QuantisedAtLoad(weights), quantised_fingerprint(fingerprint, quantization)
    if with_mtp and family.load_mtp is None:
        raise NoMtpLayer(f"models of {config.architecture} have no MTP layer")
    names = weights.remaining
    base = next((p for p in BASE_PREFIXES if f"{p}{family.embedding}.weight" in names), BASE_PREFIXES[-1])
    embedding = weights.take(f"{base}{family.embedding}.weight", (config.vocab_size, config.hidden_size))
    if config.tied_embeddings:
        weights.skip("lm_head.weight")  # some files repeat the embedding under this name
        head = embedding
    else:
        head = weights.take("lm_head.weight", (config.vocab_size, config.hidden_size))
    layers = [family.load_layer(weights, f"{base}layers.{i}", config, i) for i in range(len(config.layers))]
    norm = weights.take(f"{base}{family.final_norm}.weight", (config.hidden_size,), torch.float32)
    mtp = family.load_mtp(weights, config) if with_mtp and family.load_mtp is not None else None
    weights.assert_all_taken()
    packed_head = LinearWeight(head)
    return HybridModel(
        config=config,
        fingerprint=fingerprint,
        embedding=embedding,
        chain=BranchChain(
            tuple(branch for layer in layers for branch in layer),
            norm + family.norm_offset,
            config.norm_eps,
            config.residual_multiplier,
        ),
        head=packed_head,
        rotary_frequencies=_rotary_frequencies(config, embedding.device),
        mtp=mtp,
        draft_head=None if mtp is None else DraftHead(packed_head, draft_vocabulary),
    )


def _rotary_frequencies(config: ModelConfig, device: torch.device) -> torch.Tensor | None:
    attention = config.attention
    if attention.rotary_dim == 0:
        return None
    frequencies = inverse_frequencies(attention.rotary_dim, attention.rope_theta, device)
    scaling = attention.rope_scaling
    return frequencies if scaling is None else scaling.stretch(frequencies, attention.rope_theta)


def _read(path: Path) -> tuple[Family, ModelConfig, bool]:
    """A folder's family and config, and whether its weights are quantised."""
    raw = RawConfig.read(path)
    try:
        if raw.architecture not in FAMILIES:
            # Each wrapper of a text model stands beside that model's own name: one line holds the list.
            names = [name for name in FAMILIES if name.endswith("ForCausalLM")]
            raise UnsupportedModel(f"{raw.architecture} is not supported; supported: {', '.join(names)}")
        quantised = is_quantised(raw)
        family = FAMILIES[raw.architecture]
        return family, family.read_config(raw), quantised
    except ModelError as error:
        raise type(error)(f"{path / 'config.json'}: {error}") from error
