"""The FLOPs of a block with your own layers, from its parameters: two per token for each element of a matrix."""

from functools import lru_cache

import torch

from moe_dualpipe.expert_parallel import Local
from moe_dualpipe.expert_parallel.parameters import expert_ids

from .config import DEFAULT_OPTIONS, ModelConfig


@lru_cache(maxsize=1024)
def layer_flops_of_parameters(config: ModelConfig, layer: int) -> int | None:
    """FLOPs of the matrix products of a block, per token, forward, if each matrix is used once for a token.

    A token uses `experts_per_token` of the routed experts. Builds the block on the meta device, which allocates no
    memory. Returns None if that fails, for example because a constructor reads values.
    """
    from .block import block_class

    try:
        with torch.device("meta"):
            block = block_class(config).build(config, layer, Local(config.num_experts), DEFAULT_OPTIONS)
    except Exception:  # the layer may still work on a device; if not, building it there says why
        return None
    of_experts = expert_ids(block)
    dense = experts = 0
    for name, parameter in block.named_parameters():
        if name in of_experts:
            experts += parameter.numel()
        elif parameter.ndim > 1:
            dense += parameter.numel()
    return max(1, 2 * (dense + experts * config.experts_per_token // config.num_experts))
