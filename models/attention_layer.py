"""The contract of attention layers, and their call.

B sequences, S positions, D model dim. With a cache, S counts the new positions, and L all positions.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from .config import ModelConfig
from .context_parallel import Context
from .custom_layers import named_parameters
from .kv_cache import KVCache
from .layer_calls import call_layer, checked_output, errors_in


class AttentionLayer(nn.Module):
    """The contract of attention, with its defaults. It mixes the positions of each sequence.

    Define a constructor and `forward`; everything else is optional. A plain nn.Module with these two works as well.

        def __init__(self, config): ...
        def forward(self, x_BSD): ...                   # returns y_BSD, which is added to the residual stream

    x_BSD is normalized. A result must not depend on later positions or on other sequences. Initial weights of the last
    projection usually have the standard deviation `config.residual_std`, others `config.init_std`.

    The constructor receives, if it has parameters of these names: `layer`, the number of the block, from 0; `options`,
    annotated with a dataclass (custom_layers.py).

    `forward` receives, if it has parameters of these names:

    mask_B1SS    bool, True where a position attends to another; None: each position attends to itself and all before
                 it. Without this parameter, `--document-mask` is an error.
    cache        a KVCache (kv_cache.py) in text generation, otherwise None. Append the keys and values of the new
                 positions, and attend to all positions. Without this parameter, the cache stores the inputs, and each
                 new token recomputes all positions: correct for any causal layer, but slow for long texts.

    With `--cp`, x_BSD has two slices of each sequence that are not adjacent, and `context` is set
    (context_parallel.py). Then the block calls two methods in place of `forward`, and gathers what the first one
    returns after the queries:

        def project(self, x_BSD): ...                   # returns queries, and tensors [..., S, C] of these positions
        def attend(self, queries, *keys): ...           # these tensors for all positions, [..., L, C]; returns y_BSD

    `self.rotary.table(..., context=self.context)` has the angles of the S positions, and `self.context.cut` selects
    them from L. `attend_slices` (sdpa.py) is causal attention for them. `attend` may have the parameter mask_B1SS, here
    [B, 1, S, L]. Without these methods, `--cp` is an error. If `attend` needs fewer positions, define the attribute
    `gather`, a Collective whose results `attend` gets (examples/layers/sliding_window.py).

    `models.layers.Linear` defers its weight gradients; other modules compute them together with the input gradients.

    The static methods return costs. Of custom attention, only `score_flops`, `kv_cache_shape` and, in one case,
    `weight_flops` are used.
    """

    context: Context | None = None
    """The ranks that share each sequence. None: this rank has all positions. Set by the block."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define forward(x_BSD)")

    @staticmethod
    def weight_flops(config: ModelConfig) -> int:
        """FLOPs of the projections, per token, forward. Default: those of four square matrices.

        Used only if the block cannot be built on the meta device (costs.py), where its parameters are counted.
        """
        return 8 * config.hidden_size**2

    @staticmethod
    def score_flops(config: ModelConfig, seq_len: int) -> int:  # noqa: ARG004
        """FLOPs of scores and sums of values, per token, forward, for the metric mfu. Default: 0."""
        return 0

    @staticmethod
    def kv_cache_shape(config: ModelConfig) -> tuple[int, int, int]:
        """What a cache stores for a position in a layer: number of tensors, heads, and width. Default: the input."""
        return 1, 1, config.hidden_size


def attend(attention: nn.Module, layer: int, x_BSD: Tensor, cache: KVCache | None, mask_B1SS: Tensor | None) -> Tensor:
    """Call `attention` with the arguments that it accepts. If it does not accept a cache, the cache stores the inputs.

    Raises ValueError for a mask that it does not take.
    """
    context = accepted_context(attention, attention.forward, mask_B1SS, cache=cache)
    if cache is None or "cache" in context:
        return call_layer("attention", attention, x_BSD, **context)
    return call_layer("attention", attention, with_past(cache, layer, x_BSD), **context)[:, -x_BSD.shape[1] :]


def project(attention: nn.Module, x_BSD: Tensor) -> tuple[Tensor, ...]:
    """The queries, and the tensors to gather. `attention` has a context."""
    with errors_in("attention", attention):
        return attention.project(x_BSD)  # type: ignore[operator]


def attend_gathered(
    attention: nn.Module, x_BSD: Tensor, queries: Tensor, *keys: Tensor, mask_B1SS: Tensor | None
) -> Tensor:
    """What attention adds to `x_BSD`. Raises ValueError for a mask that it does not take."""
    call: Any = attention.attend
    context = accepted_context(attention, call, mask_B1SS)
    with errors_in("attention", attention):
        out = call(queries, *keys, **context)
    return checked_output("attention", attention, x_BSD, out)


_parameters = lru_cache(maxsize=256)(named_parameters)  # inspecting a signature is slow, and each forward asks


def accepted_context(
    layer: nn.Module, call: Callable[..., Any], mask_B1SS: Tensor | None, **others: Any
) -> dict[str, Any]:
    """The arguments after `call` as keyword arguments, each only if the method `call` has a parameter of that name.

    Raises ValueError for a mask that it does not take.
    """
    names = _parameters(getattr(call, "__func__", call))
    if mask_B1SS is not None and "mask_B1SS" not in names:
        raise ValueError(f"{type(layer).__name__}.{call.__name__} has no parameter mask_B1SS: it cannot mask documents")
    context = {"mask_B1SS": mask_B1SS, **others}
    return {name: value for name, value in context.items() if name in names}


def with_past(cache: KVCache, layer: int, x_BSD: Tensor) -> Tensor:
    """Append inputs to a cache, and return those of all positions, [B, L, D]."""
    (all_B1LD,) = cache.append(layer, x_BSD[:, None])
    return all_B1LD[:, 0]
