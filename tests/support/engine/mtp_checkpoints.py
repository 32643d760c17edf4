"""MTP layers for the tiny checkpoints, and their oracle: `tiny_models.train.mtp` and `NemotronMtp` are made of
transformers' layers.

The oracle follows vLLM's order of things, not Headrace's: pair i is the vector of token i with token i + 1, at position
i, and a draft is made by a full pass over all pairs.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, NemotronHConfig, PreTrainedModel

from tests.support.engine.tiny_checkpoints import load_oracle, randomize_weights
from tiny_models.train.mtp import MtpModule


class NemotronMtp(nn.Module):
    """Super's layer for multi-token prediction, after vLLM's: an attention layer and one of experts."""

    def __init__(self, base: NemotronHConfig):
        super().__init__()
        config = copy.deepcopy(base)
        config.layers_block_type = ["full_attention", "moe"]
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        hidden, norm = config.hidden_size, type(self.model.base_model.norm_f)
        self.enorm, self.hnorm = (norm(hidden, eps=config.layer_norm_epsilon) for _ in range(2))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """m [B, T, hidden] of all pairs of B rows."""
        pairs = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        return self.model.base_model(inputs_embeds=pairs, use_cache=False)[0]

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint has them: layers under the names that transformers saves."""
        with TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            saved = load_file(Path(folder) / "model.safetensors")
        named = {name.partition(".layers.")[2]: weight for name, weight in saved.items() if ".layers." in name}
        named["1.final_layernorm.weight"] = self.model.base_model.norm_f.weight.detach()
        for part in ("enorm", "hnorm", "eh_proj"):
            named[f"0.{part}.weight"] = getattr(self, part).weight.detach()
        return {f"mtp.layers.{name}": weight for name, weight in named.items()}


@dataclass(frozen=True)
class MtpOracle:
    """The base model and its MTP layer in transformers, float32 on a CPU."""

    base: PreTrainedModel
    mtp: MtpModule | NemotronMtp

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """[len(tokens), V] of the base model."""
        return self.base(torch.tensor([tokens]), position_ids=torch.arange(len(tokens))[None]).logits[0]

    @torch.inference_mode()
    def draft_logits(self, tokens: list[int], num_drafts: int) -> Tensor:
        """[num_drafts, V]: the drafts that follow `tokens`, each from the greedy one before it."""
        ids, embed = torch.tensor([tokens]), self.base.get_input_embeddings()
        hidden = self.base.base_model(ids, position_ids=torch.arange(len(tokens))[None], use_cache=False)[0][0, :-1]
        embedded = embed(ids[0, 1:])
        logits = []
        for _ in range(num_drafts):
            last = self.mtp(embedded[None], hidden[None])[0, -1:]
            logits.append(self.base.lm_head(last)[0])
            embedded = torch.cat((embedded, embed(logits[-1].argmax()[None])))
            hidden = torch.cat((hidden, last))
        return torch.stack(logits)


def add_mtp(path: Path, seed: int = 0, *, is_stacked: bool = True) -> MtpOracle:
    """Writes a random MTP layer into the checkpoint at `path`, and returns the oracle of both.

    is_stacked   Qwen's experts as stacked tensors; otherwise a matrix for each, as Nemotron's always are
    """
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(path)
    mtp = (NemotronMtp if isinstance(config, NemotronHConfig) else MtpModule)(config).eval()
    with torch.no_grad():
        randomize_weights(mtp, seed)
    _write(path, mtp.tensors() if is_stacked else _each_expert(mtp.tensors()))
    return MtpOracle(load_oracle(path), mtp)


def train_mtp(path: Path, oracle: MtpOracle, texts: Sequence[Sequence[int]], num_steps: int) -> None:
    """Trains the layer, and writes it to `path`, until it knows how these texts go on: so drafts of them are right.

    The second draft is trained on the vectors of the first.
    """
    base, mtp = oracle.base, oracle.mtp
    pairs = []
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([text])
            hidden = base.base_model(ids, position_ids=torch.arange(len(text))[None], use_cache=False)[0][0]
            pairs.append((base.get_input_embeddings()(ids[0]), hidden, ids[0]))
    optimizer = torch.optim.Adam(mtp.parameters(), lr=2e-3)
    for _ in range(num_steps):
        loss = torch.zeros(())
        for embedded, hidden, ids in pairs:
            first = mtp(embedded[None, 1:-1], hidden[None, :-2])[0]
            second = mtp(embedded[None, 2:-1], first[None, :-1])[0]
            loss = loss + cross_entropy(base.lm_head(first), ids[2:]) + cross_entropy(base.lm_head(second), ids[3:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    _write(path, mtp.tensors())


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    file = path / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def _each_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacked experts as matrices of their own."""
    each: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        prefix, _, kind = name.rpartition(".experts.")
        if not prefix:
            each[name] = weight
            continue
        for expert, matrix in enumerate(weight):
            parts = {"gate_proj": matrix.chunk(2)[0], "up_proj": matrix.chunk(2)[1]} if kind == "gate_up_proj" else {}
            for part, rows in (parts or {"down_proj": matrix}).items():
                each[f"{prefix}.experts.{expert}.{part}.weight"] = rows.contiguous()
    return each
