"""The multi-token-prediction layer of a Qwen3.5-type model, for training: transformers drops `mtp.*` when it loads.

Pair t joins the embedding of token t with the model's hidden vector of token t - 1 behind its final norm; the layer's
vector m of pair t predicts token t + 1. A second pass, with m in the place of the hidden vectors, predicts one further.
`headrace/models/mtp.py` serves the same layer, and names the sources.
"""

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

MTP_PREFIX = "mtp."  # of its tensors' names in a checkpoint
TRAINED_DRAFTS = 2


class MtpModule(nn.Module):
    """Parameters under the names that follow `mtp.` in a checkpoint."""

    def __init__(self, base: PretrainedConfig):
        super().__init__()
        config = copy.deepcopy(base)
        config.num_hidden_layers, config.layer_types, config.mlp_only_layers = 1, ["full_attention"], []
        body = AutoModel.from_config(config, dtype=torch.float32)
        body.embed_tokens = None  # it is the model's own
        self.body = body
        hidden, norm = config.hidden_size, type(body.norm)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (norm(hidden, eps=config.rms_norm_eps) for _ in range(2))
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """m [B, T, hidden] of all pairs of B rows."""
        pairs = self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1))
        positions = torch.arange(pairs.shape[1], device=pairs.device)[None]
        return self.body(inputs_embeds=pairs, position_ids=positions, use_cache=False)[0]

    def tensors(self) -> dict[str, Tensor]:
        """As a checkpoint has them."""
        named = {name.removeprefix("body."): weight.detach() for name, weight in self.named_parameters()}
        return {f"{MTP_PREFIX}{name}": weight for name, weight in named.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes the values that `tensors` has under a checkpoint's names; each must be there."""
        with torch.no_grad():
            for name, weight in self.tensors().items():
                weight.copy_(tensors[name])


def mtp_layer(folder: Path, config: PretrainedConfig) -> MtpModule | None:
    """The layer of the model in `folder`, untrained if the weights have none yet; None if its config has none."""
    if not getattr(config, "mtp_num_hidden_layers", 0):
        return None
    mtp = MtpModule(config)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys() if name.startswith(MTP_PREFIX)}  # noqa: SIM118
    if stored:
        mtp.load(stored)
    return mtp


def draft_loss(mtp: MtpModule, model: PreTrainedModel, tokens: Tensor, hidden: Tensor, counts: Tensor) -> Tensor:
    """Mean loss of the first and the second draft where `counts`; trains the layer alone, not the model.

    tokens   [B, T]
    hidden   [B, T, hidden]: of the model, behind its final norm
    counts   bool [B, T]: tokens whose prediction is part of the loss
    """
    vectors, embedded = hidden.detach(), model.get_input_embeddings()(tokens).detach()
    head = model.get_output_embeddings().weight.detach()
    loss = torch.zeros((), device=tokens.device)
    for draft in range(1, TRAINED_DRAFTS + 1):
        vectors = mtp(embedded[:, draft:], vectors[:, :-1])  # vectors[:, i] belongs to token draft + i
        at, predicted = counts[:, draft + 1 :], tokens[:, draft + 1 :]
        loss = loss + F.cross_entropy(F.linear(vectors[:, :-1][at], head).float(), predicted[at])
    return loss / TRAINED_DRAFTS
