"""Layers written as plain loops, to compare with."""

import torch
from torch import nn

from moe_dualpipe.models import MoE


def swiglu_oracle(x, gate_up, down):
    gate, up = (gate_up @ x).chunk(2)
    return down @ (gate * torch.sigmoid(gate) * up)


def moe_oracle(layer: MoE, x_TD: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    weights, ids = layer.router(x_TD)
    rows = []
    for t, x in enumerate(x_TD):
        chosen = zip(weights[t], ids[t].tolist(), strict=True)
        y = sum(w * swiglu_oracle(x, layer.experts.gate_up[e], layer.experts.down[e]) for w, e in chosen)
        if layer.shared is not None:
            gate = 1.0 if layer.shared_gate is None else 1 / (1 + (-layer.shared_gate.weight[0] @ x).exp())
            y = y + gate * swiglu_oracle(x, layer.shared.gate_up.weight, layer.shared.down.weight)
        rows.append(y)
    return torch.stack(rows)


def uneven_norms(module):
    """`module` in fp64 with random weights in every norm, so a missing or exchanged norm changes the result."""
    with torch.no_grad():
        for norm in module.modules():
            if isinstance(norm, nn.RMSNorm):
                norm.weight.uniform_(0.5, 2)
    return module.double()
