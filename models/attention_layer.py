"""The contract of attention: what a class must define to replace the built-in kinds, and what it may define.

B sequences, S positions, D model dim. With a cache, S counts the new positions, and L all positions.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .config import ModelConfig
from .kv_cache import KVCache
from .own_calls import call_layer


class AttentionLayer(nn.Module):
    """The contract of attention, with its defaults. It mixes the positions of each sequence.

    Define a constructor and `forward`; everything else is optional. A plain nn.Module with these two works as well.

        def __init__(self, config): ...
        def forward(self, x_BSD): ...                   # returns y_BSD, which is added to the residual stream

    x_BSD is normalized. A result must not depend on later positions or on other sequences. Initial weights of the last
    projection usually have the standard deviation `config.residual_std`, others `config.init_std`.

    The constructor receives, if it has parameters of these names: `layer`, the number of the block, from 0; `options`,
    annotated with a dataclass (layer_options.py).

    `forward` receives, if it has parameters of these names:

    mask_B1SS    which positions each position attends to, bool; None: itself and all before it. Without this parameter,
                 `--document-mask` is an error.
    cache        a KVCache (kv_cache.py) in text generation, else None: append the keys and values of the new positions
                 and attend to all. Without this parameter, the cache keeps the inputs of all positions, and each new
                 token computes all of them again: correct for any causal layer, but slow for long texts.

    Linear layers of `models.layers` defer their weight gradients; others compute them with the input gradients.
    """

    def forward(self, x_BSD: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define forward(x_BSD)")

    @staticmethod
    def weight_flops(config: ModelConfig) -> int:
        """FLOPs of the projections, per token, forward. Default: two for each parameter of the block (costs.py)."""
        raise NotImplementedError

    @staticmethod
    def score_flops(config: ModelConfig, seq_len: int) -> int:  # noqa: ARG004
        """FLOPs of scores and sums of values, per token, forward, for the metric mfu. Default: 0."""
        return 0

    @staticmethod
    def saved_bytes(config: ModelConfig, tokens: int, seq_len: int, element: int) -> int:
        """Bytes saved for backward, without the layer's input. element: bytes of one number of an activation."""
        raise NotImplementedError

    @staticmethod
    def deferred_width(config: ModelConfig) -> int:
        """Numbers per token saved for deferred weight gradients, without the layer's input and output gradient."""
        raise NotImplementedError

    @staticmethod
    def kv_cache_shape(config: ModelConfig) -> tuple[int, int, int]:
        """What a cache stores for a position in a layer: number of tensors, heads, and width. Default: the input."""
        return 1, 1, config.hidden_size


def attend(attention: nn.Module, layer: int, x_BSD: Tensor, cache: KVCache | None, mask_B1SS: Tensor | None) -> Tensor:
    """Call `attention` with the arguments that it has. Without `cache`, a cache keeps the inputs, and all are computed.

    Raises ValueError for a mask that it does not take.
    """
    context = accepted_context(attention, attention.forward, mask_B1SS, cache)
    if cache is None or "cache" in context:
        return call_layer("attention", attention, x_BSD, **context)
    return call_layer("attention", attention, with_past(cache, layer, x_BSD), **context)[:, -x_BSD.shape[1] :]


def accepted_context(
    layer: nn.Module, call: Callable[..., Any], mask_B1SS: Tensor | None, cache: KVCache | None
) -> dict[str, Any]:
    """Those of the arguments `mask_B1SS` and `cache` that a method of a layer names.

    Raises ValueError for a mask that it does not take.
    """
    names = inspect.signature(call).parameters
    if mask_B1SS is not None and "mask_B1SS" not in names:
        raise ValueError(f"{type(layer).__name__}.{call.__name__} has no parameter mask_B1SS: it cannot mask documents")
    context = {"mask_B1SS": mask_B1SS, "cache": cache}
    return {name: value for name, value in context.items() if name in names}


def with_past(cache: KVCache, layer: int, x_BSD: Tensor) -> Tensor:
    """Append inputs to a cache, and return those of all positions, [B, L, D]."""
    (all_B1LD,) = cache.append(layer, x_BSD[:, None])
    return all_B1LD[:, 0]
