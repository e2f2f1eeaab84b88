"""The reference model in plain autograd, without segments or a tape, to compare the engine with."""

from typing import Any

from torch import Tensor

from moe_dualpipe.expert_parallel import combine, dispatch
from moe_dualpipe.models import MoE, TransformerStage


def plain_forward(model: TransformerStage, x: Tensor) -> Tensor:
    """Compute `model(x)` for a whole model. Every transfer is waited for where it is started."""
    x = model.embedding(x)
    for block in model.layers.values():
        x = _plain_block(block, x)
    return model.head(model.norm(x))


def _plain_block(block: Any, x: Tensor) -> Tensor:
    h = x + block.attention(block.attention_norm(x))
    normal = block.mlp_norm(h)
    mlp = block.mlp
    if not isinstance(mlp, MoE):
        return h + mlp(normal)
    x_TD, ep = normal.flatten(0, 1), mlp.expert_parallel
    weights_TK, ids_TK, *_ = mlp.router(normal)
    route = ep.prepare(ids_TK)
    out_ND = mlp.run_experts(*dispatch(x_TD, weights_TK, route, ep), route)
    y_TD = combine(out_ND, route, ep)
    if mlp.shared is not None:
        y_TD = y_TD + mlp.shared(x_TD)
    return h + y_TD.view_as(h)
