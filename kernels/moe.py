"""Experts of a mixture: each token's rows through its chosen SwiGLU experts, summed with the router's
weights.

    y_t = sum_j weight[t, j] * down_e(silu(gate_e x_t) * up_e x_t)          e = expert[t, j]

Shapes    x [T, D]; expert, weight [T, k]; gate_up [E, 2I, D] (gate rows first); down [E, D, I]; returns y
          [T, D]
Contract  the experts of one token differ; an expert that no token chose is not read
Numerics  in x's dtype, the sum over experts too
Source    Shazeer et al. 2017, "Outrageously Large Neural Networks"; tokens grouped by expert as in MegaBlocks
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def moe_experts(x: Tensor, expert: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    E, twice_I, D = gate_up.shape
    if x.shape[1] != D or down.shape != (E, D, twice_I // 2) or expert.shape != weight.shape:
        raise ValueError(
            f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)}, "
            f"expert {tuple(expert.shape)}, weight {tuple(weight.shape)} disagree"
        )
    return moe_experts_torch(x, expert, weight, gate_up, down)


def moe_experts_torch(x: Tensor, expert: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    chosen, order = expert.flatten().sort(stable=True)
    token = order // expert.shape[1]
    rows = x.index_select(0, token)
    counts = torch.bincount(chosen, minlength=len(gate_up)).tolist()
    outputs = torch.empty_like(rows)
    first = 0
    for e, count in enumerate(counts):
        if count:
            here = slice(first, first + count)
            gate, up = F.linear(rows[here], gate_up[e]).chunk(2, dim=-1)
            outputs[here] = F.linear(F.silu(gate) * up, down[e])
            first += count
    outputs *= weight.flatten()[order, None]
    return torch.zeros_like(x).index_add_(0, token, outputs)
