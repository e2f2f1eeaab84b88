"""One transformer block: attention, then a dense MLP or experts, each on a normalized copy of the residual stream.

Your own class can replace it: `BlockLayer` is its contract.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_dualpipe.errors import in_context
from moe_dualpipe.expert_parallel import ExpertParallel
from moe_dualpipe.overlap import Comm, Compute, Segmented, Segments
from moe_dualpipe.overlap.segment import CommResult

from .attention import attention_class
from .attention_layer import accepted_context, attend, attend_gathered, project, with_past
from .build_experts import expert_class
from .config import DEFAULT_OPTIONS, ModelConfig, StageOptions
from .context_parallel import KEYS, Context
from .custom_layers import LayerClass, custom_source, find_layer
from .kv_cache import KVCache
from .layer_calls import call_layer, checked_output
from .layers import SwiGLU
from .moe import MoE
from .recompute import add_up, normalize, normalize_again, recompute_saved
from .router import router_class


class BlockLayer(Segmented):
    """The contract of a transformer block, with its defaults.

        def __init__(self, config, layer, expert_parallel, stage_options): ...
        def segments(self, x_BSD): ...                  # a generator; returns the new residual stream [B, S, D]

    layer: the number of the block, from 0. expert_parallel: pass it to `MoE(config, expert_parallel, layer,
    stage_options)`, whose `segments` or `exchange` dispatch tokens to experts. stage_options: kernels, recomputation,
    seed. If the constructor has a parameter `options`, annotated with a dataclass, it receives the options of the block
    (custom_layers.py).

    `segments` yields Compute and Comm (overlap/segment.py). Between them, the engine runs segments of other chunks,
    which hides the communication. A plain nn.Module with `forward(x_BSD)` works as well, as a single segment.

    `segments` and `forward` may have the parameters `mask_B1SS` and `cache`, as in `AttentionLayer`. Without the
    parameter `cache`, the cache stores the block's inputs, and each new token recomputes all positions. `segments` may
    have the parameter `rows_B`, to pass to `MoE.route` or `MoE.segments`: a batch with padding needs it.

    With `--cp`, x_BSD has the positions of this rank, and `stage_options.context` is the `Context` of the ranks that
    share its sequences (context_parallel.py), otherwise None. A class that gathers what its attention needs sets
    `gathers_keys`; subclasses do not inherit it.
    """

    gathers_keys: bool = False


class Block(BlockLayer):
    """Block number `layer` of the model."""

    compiled: bool = False
    """Set by the model: whether torch.compile fuses sums and norms."""
    gathers_keys = True

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        expert_parallel: ExpertParallel,
        stage_options: StageOptions = DEFAULT_OPTIONS,
    ):
        super().__init__()
        recompute = stage_options.recompute
        self.recompute_attention, self.recompute_mlp = recompute in ("attention", "full"), recompute == "full"
        # If a whole segment is recomputed, its norms are not recomputed separately.
        self.recompute_attention_norms = recompute == "norms"
        self.recompute_mlp_norm = recompute in ("norms", "attention")
        out_std = config.residual_std
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.layer = layer
        self.attention = attention_class(config).build(config, layer=layer)
        self.context = stage_options.context
        if self.context is not None:
            _set_context(self.attention, self.context)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        if config.is_dense(layer):
            self.mlp = SwiGLU(config.hidden_size, config.dense_size, config.init_std, out_std)
        else:
            self.mlp = MoE(config, expert_parallel, layer, stage_options)

    def segments(self, x_BSD: Tensor) -> Segments:
        parts = yield from self.parts(x_BSD)
        return (yield Compute("add", add_up, *parts))

    def parts(
        self, *parts: Tensor | CommResult, cache: KVCache | None = None, mask_B1SS: Tensor | None = None,
        rows_B: Tensor | None = None,
    ) -> Segments:  # fmt: skip
        """The block's segments. They take and return the residual stream as parts; the stream is their sum.

        The next layer adds them up, so no segment waits for the last part earlier than necessary.
        mask_B1SS: which positions each position attends to. None: itself and all before it. rows_B: see `MoE.route`.
        """
        sources = [custom_source(layer) for layer in (self.attention, getattr(self.mlp, "router", None))]
        source = sources[0] or sources[1] if None in sources else None  # if both are the user's, either may have failed
        finish = partial(self.route, rows_B=rows_B) if isinstance(self.mlp, MoE) else add_up
        if self.context is None:
            attend = partial(self.attend, finish, cache=cache, mask_B1SS=mask_B1SS)
        else:
            projected = yield Compute(
                "qkv", self.project, *parts, recompute=self.recompute_attention, source=sources[0]
            )
            x_BSD, queries, *keys = projected
            attend = partial(self.attend_gathered, finish, mask_B1SS=mask_B1SS)
            gather = getattr(self.attention, "gather", self.context.gather)
            parts = x_BSD, queries, (yield Comm(KEYS, gather, *keys))
        attended = yield Compute("attn", attend, *parts, recompute=self.recompute_attention, source=source)
        if not isinstance(self.mlp, MoE):
            return attended, (yield Compute("mlp", self.dense_mlp, attended, recompute=self.recompute_mlp))
        h_BSD, x_TD, *decision = attended
        recompute_x = None
        if self.recompute_mlp_norm:
            recompute_x = partial(normalize_again, self.mlp_norm, h_BSD.detach(), self.compiled)
        return h_BSD, *(yield from self.mlp.exchange(x_TD, *decision, recompute_x=recompute_x))

    def attend(self, finish: Callable[..., Any], *parts: Tensor, **context: Any) -> Any:
        """`finish` of the residual stream before attention, and what attention adds to it."""
        return finish(*self._normalized(parts, partial(attend, self.attention, self.layer, **context)))

    def project(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """The residual stream, the queries, and what to gather of this rank's positions."""
        x_BSD, projected = self._normalized(parts, partial(project, self.attention))
        return x_BSD, *projected

    def attend_gathered(
        self, finish: Callable[..., Any], x_BSD: Tensor, *projected: Tensor, mask_B1SS: Tensor | None
    ) -> Any:
        return finish(x_BSD, attend_gathered(self.attention, x_BSD, *projected, mask_B1SS=mask_B1SS))

    def _normalized(self, parts: tuple[Tensor, ...], compute: Callable[[Tensor], Any]) -> tuple[Tensor, Any]:
        """The residual stream, and `compute` of its normalized copy."""
        norms = self.recompute_attention_norms
        x_BSD, y_BSD, recompute_y = normalize(self.attention_norm, parts, norms, self.compiled)
        with recompute_saved(y_BSD, recompute_y):
            return x_BSD, compute(y_BSD)

    def route(self, *attended: Tensor, rows_B: Tensor | None = None) -> tuple[Tensor, ...]:
        h_BSD, x_BSD, recompute_x = normalize(self.mlp_norm, attended, self.recompute_attention_norms, self.compiled)
        with recompute_saved(x_BSD, recompute_x):
            return h_BSD, *self.mlp.route(x_BSD, rows_B)  # type: ignore[union-attr]

    def dense_mlp(self, h_BSD: Tensor) -> Tensor:
        _, x_BSD, recompute_x = normalize(self.mlp_norm, (h_BSD,), self.recompute_mlp_norm, self.compiled)
        with recompute_saved(x_BSD, recompute_x):
            return self.mlp(x_BSD)


def _set_context(attention: nn.Module, context: Context) -> None:
    """Raises ValueError for attention without `project` and `attend`."""
    if not (hasattr(attention, "project") and hasattr(attention, "attend")):
        raise ValueError(
            f"with --cp {context.size}, {type(attention).__name__} needs positions that other ranks hold: define "
            "project(x_BSD) and attend(queries, *keys), between which the block gathers keys (AttentionLayer), or use "
            "--cp 1"
        )
    attention.context = context  # type: ignore[assignment]


def check_context(block: nn.Module, context: Context | None) -> None:
    """Raise ValueError for a block that does not say that it gathers keys. Subclasses do not inherit it."""
    if context is not None and not vars(type(block)).get("gathers_keys", False):
        raise ValueError(
            f"with --cp {context.size}, {type(block).__name__} may need positions that other ranks hold: yield "
            'Comm("keys", stage_options.context.gather, k, v), of tensors [..., S, C], before its attention, and set '
            "gathers_keys = True in the class (BlockLayer); or use --cp 1"
        )


def block_class(config: ModelConfig) -> LayerClass:
    """The block that `config` names. Raises ValueError for a class that does not fit."""
    form = "config", "layer", "expert_parallel", "stage_options"
    return find_layer("block", str(config.block), {"prenorm": Block}, [form], str(config.block_options))


def check_layers(config: ModelConfig) -> None:
    """Raise ValueError if a class that `config` names cannot be found or called, or does not have these options."""
    for find in (expert_class, router_class, attention_class, block_class):
        find(config)


def block_parts(
    block: nn.Module, layer: int, parts: tuple[Tensor | CommResult, ...], cache: KVCache | None = None,
    mask_B1SS: Tensor | None = None, rows_B: Tensor | None = None,
) -> Segments:  # fmt: skip
    """The segments of any block. They take and return the residual stream as parts, as `Block.parts` does.

    Raises ValueError for a mask that the block does not take.
    """
    if isinstance(block, Block):
        return (yield from block.parts(*parts, cache=cache, mask_B1SS=mask_B1SS, rows_B=rows_B))
    x_BSD = yield Compute("add", add_up, *parts)
    run = getattr(block, "segments", None)
    context = accepted_context(block, run or block.forward, mask_B1SS, cache=cache, rows_B=rows_B)
    all_BLD = with_past(cache, layer, x_BSD) if cache is not None and "cache" not in context else x_BSD
    if run:
        try:
            y_BLD = yield from run(all_BLD, **context)
        except Exception as error:  # between two segments
            in_context(error, "block")
            raise
        y_BLD = _checked(block, all_BLD, y_BLD)
    else:
        y_BLD = yield Compute("attn", partial(call_layer, "block", block, **context), all_BLD)
    return (y_BLD[:, -x_BSD.shape[1] :] if all_BLD is not x_BSD else y_BLD,)


def _checked(block: nn.Module, x_BSD: Tensor, y_BSD: Any) -> Any:
    """Return `y_BSD`, after a check unless it is still being received."""
    return y_BSD if isinstance(y_BSD, CommResult) else checked_output("block", block, x_BSD, y_BSD)
