"""Which published tensors make up each tensor of this model, as a table that serves both directions.

This model stacks matrices that are multiplied together: queries, keys and values; gate and up. Published models store
each matrix separately, or stack the experts of a layer. So a tensor of this model is a list of `PublishedRows`, stacked
along the first dimension. The rows may be in another order: DeepSeek rotates channels (2i, 2i + 1) together, and this
model rotates channels (i, i + C/2).

E experts, D model dim, F inner width, H heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...models import ModelConfig
from .architectures import Architecture

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """Rows of a tensor of this model, as a published tensor, or as one entry of its first dimension.

    name, shape: of the published tensor, without the first dimension if `index` selects one entry. order: for each row
    of this model, the index of the published row. swapped: the left and right halves of the columns are exchanged.
    """

    name: str
    shape: tuple[int, ...]
    index: int | None = None
    order: Tensor | None = field(default=None, compare=False)
    swapped: bool = False

    def from_published(self, tensor: Tensor) -> Tensor:
        tensor = tensor if self.order is None else tensor[self.order]
        return _swap_halves(tensor) if self.swapped else tensor

    def to_published(self, tensor: Tensor) -> Tensor:
        tensor = _swap_halves(tensor) if self.swapped else tensor
        return tensor if self.order is None else tensor[self.order.argsort()]


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of this model, by its global name, and its parts in the order of its rows."""

    name: str
    parts: tuple[PublishedRows, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (sum(part.shape[0] for part in self.parts), *first[1:])


@dataclass(frozen=True, slots=True)
class Layout:
    """The published tensors of one model. stacked: the experts of a layer are one tensor, as transformers holds them.

    interleaved: rotations pair channels (2i, 2i + 1).
    """

    model: ModelConfig
    architecture: Architecture
    stacked: bool = False
    interleaved: bool = False

    def targets(self) -> Iterator[Target]:
        """All tensors of the model, in the order of its layers."""
        model, width = self.model, self.model.hidden_size
        yield _one("embedding.weight", EMBEDDING, model.vocab_size, width)
        for layer in range(model.num_layers):
            yield from self._block(f"layers.{layer}", f"model.layers.{layer}", model.is_dense(layer))
        yield _one("norm.weight", "model.norm.weight", width)
        if not model.tied_embeddings:
            yield _one("head.weight", HEAD, model.vocab_size, width)
        for k, layer in enumerate(model.mtp_blocks):
            ours, theirs = f"mtp.{k}", f"model.layers.{layer}"
            yield _one(f"{ours}.token_norm.weight", f"{theirs}.enorm.weight", width)
            yield _one(f"{ours}.hidden_norm.weight", f"{theirs}.hnorm.weight", width)
            join = PublishedRows(f"{theirs}.eh_proj.weight", (width, 2 * width), swapped=True)
            yield Target(f"{ours}.join.weight", (join,))
            yield from self._block(f"{ours}.block", theirs, model.is_dense(layer))
            yield _one(f"{ours}.norm.weight", f"{theirs}.shared_head.norm.weight", width)

    def copies(self) -> dict[str, str]:
        """Published tensors that repeat another one: each MTP module has the embedding and the head once more.

        A tied head, which some folders have, is not among them: transformers does not write it.
        """
        head = EMBEDDING if self.model.tied_embeddings else HEAD
        found = {}
        for layer in self.model.mtp_blocks:
            found[f"model.layers.{layer}.embed_tokens.weight"] = EMBEDDING
            found[f"model.layers.{layer}.shared_head.head.weight"] = head
        return found

    def unused(self) -> dict[str, tuple[int, ...]]:
        """Published tensors without effect, and their shapes: those of the shared experts of a model that has none.

        transformers writes them and expects them, but other programs do not.
        """
        if self.architecture.shared == "none" or self.model.num_shared_experts:
            return {}
        found: dict[str, tuple[int, ...]] = {}
        for layer in self.model.routed_blocks():
            shared = f"model.layers.{layer}.mlp.{self.architecture.shared_name}"
            names = f"{shared}.gate_proj", f"{shared}.up_proj", f"{shared}.down_proj"
            empty = _swiglu("", names, self.model.hidden_size, 0)
            found |= {part.name: part.shape for target in empty for part in target.parts}
            if self.architecture.shared == "sized":
                found[f"{shared}_gate.weight"] = (1, self.model.hidden_size)
        return found

    def _block(self, ours: str, theirs: str, dense: bool) -> Iterator[Target]:
        width = self.model.hidden_size
        yield _one(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", width)
        mla = self.model.attention == "mla"
        yield from (self._latent if mla else self._grouped)(f"{ours}.attention", f"{theirs}.self_attn")
        if self.model.out_bias:
            yield _one(f"{ours}.attention.out.bias", f"{theirs}.self_attn.o_proj.bias", width)
        yield _one(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", width)
        if dense:
            names = f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj", f"{theirs}.mlp.down_proj"
            yield from _swiglu(f"{ours}.mlp", names, width, self.model.dense_size)
        else:
            mlp = "mlp" if self.stacked else self.architecture.mlp
            yield from self._experts(f"{ours}.mlp", f"{theirs}.{mlp}")

    def _grouped(self, ours: str, theirs: str) -> Iterator[Target]:
        model = self.model
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        projections = ("q_proj", queries), ("k_proj", keys), ("v_proj", keys)
        kinds = ("weight", "bias") if model.qkv_bias else ("weight",)
        for kind in kinds:
            columns = (model.hidden_size,) if kind == "weight" else ()
            parts = (PublishedRows(f"{theirs}.{name}.{kind}", (rows, *columns)) for name, rows in projections)
            yield Target(f"{ours}.qkv.{kind}", tuple(parts))
        if model.qk_norm != "none":
            norms = (model.head_dim,) * 2 if model.qk_norm == "head" else (queries, keys)
            for name, size in zip(("q_norm", "k_norm"), norms, strict=True):
                yield _one(f"{ours}.{name}.weight", f"{theirs}.{name}.weight", size)
        yield _one(f"{ours}.out.weight", f"{theirs}.o_proj.weight", model.hidden_size, queries)

    def _latent(self, ours: str, theirs: str) -> Iterator[Target]:
        model, width, heads = self.model, self.model.hidden_size, self.model.num_heads
        query_rows = heads * (model.head_dim + model.rope_dim)
        query_order = self._order(heads, model.head_dim)
        first = ("q_a_proj", model.q_rank, None) if model.q_rank else ("q_proj", query_rows, query_order)
        latent = "kv_a_proj_with_mqa", model.kv_rank + model.rope_dim, self._order(1, model.kv_rank)
        both, biased = (first, latent), (first, latent) if model.q_rank else (latent,)
        parts = (PublishedRows(f"{theirs}.{name}.weight", (rows, width), order=order) for name, rows, order in both)
        yield Target(f"{ours}.down.weight", tuple(parts))
        if model.qkv_bias:
            parts = (PublishedRows(f"{theirs}.{name}.bias", (rows,), order=order) for name, rows, order in biased)
            yield Target(f"{ours}.bias", tuple(parts))
        if model.q_rank:
            yield _one(f"{ours}.q_norm.weight", f"{theirs}.q_a_layernorm.weight", model.q_rank)
            up = PublishedRows(f"{theirs}.q_b_proj.weight", (query_rows, model.q_rank), order=query_order)
            yield Target(f"{ours}.q_up.weight", (up,))
        yield _one(f"{ours}.kv_norm.weight", f"{theirs}.kv_a_layernorm.weight", model.kv_rank)
        rows = heads * (model.head_dim + model.value_dim)
        yield _one(f"{ours}.kv_up.weight", f"{theirs}.kv_b_proj.weight", rows, model.kv_rank)
        yield _one(f"{ours}.out.weight", f"{theirs}.o_proj.weight", width, heads * model.value_dim)

    def _order(self, heads: int, unrotated: int) -> Tensor | None:
        return rotary_order(heads, unrotated, self.model.rope_dim) if self.interleaved else None

    def _experts(self, ours: str, theirs: str) -> Iterator[Target]:
        model, width, inner = self.model, self.model.hidden_size, self.model.expert_size
        yield _one(f"{ours}.router.logits.weight", f"{theirs}.gate.weight", model.num_experts, width)
        if model.router_bias:
            yield _one(f"{ours}.router.bias_E", f"{theirs}.gate.e_score_correction_bias", model.num_experts)
        for e in range(model.num_experts):
            if self.stacked:
                gate_up = PublishedRows(f"{theirs}.experts.gate_up_proj", (2 * inner, width), index=e)
                yield Target(f"{ours}.experts.gate_up.{e}", (gate_up,))
                down = PublishedRows(f"{theirs}.experts.down_proj", (width, inner), index=e)
                yield Target(f"{ours}.experts.down.{e}", (down,))
            else:
                gate, up, down = (f"{theirs}.experts.{e}.{matrix}.weight" for matrix in self.architecture.matrices)
                parts = PublishedRows(gate, (inner, width)), PublishedRows(up, (inner, width))
                yield Target(f"{ours}.experts.gate_up.{e}", parts)
                yield _one(f"{ours}.experts.down.{e}", down, width, inner)
        if model.num_shared_experts:
            shared = f"{theirs}.{self.architecture.shared_name}"
            names = f"{shared}.gate_proj", f"{shared}.up_proj", f"{shared}.down_proj"
            yield from _swiglu(f"{ours}.shared", names, width, model.num_shared_experts * inner)
            if model.shared_gate:
                yield _one(f"{ours}.shared_gate.weight", f"{shared}_gate.weight", 1, width)


def _one(ours: str, theirs: str, *shape: int) -> Target:
    return Target(ours, (PublishedRows(theirs, shape),))


def _swiglu(ours: str, names: Sequence[str], width: int, inner: int) -> Iterator[Target]:
    gate, up, down = (f"{name}.weight" for name in names)
    yield Target(f"{ours}.gate_up.weight", (PublishedRows(gate, (inner, width)), PublishedRows(up, (inner, width))))
    yield _one(f"{ours}.down.weight", down, width, inner)


@lru_cache(maxsize=16)
def rotary_order(heads: int, unrotated: int, rotated: int) -> Tensor:
    """For each row, its published row: in each head, `unrotated` rows as they are, then the rotated ones, even first.

    Example: 1 head of 1 unrotated and 4 rotated rows: [0, 1, 3, 2, 4].
    """
    rows_HC = torch.arange(heads * (unrotated + rotated)).view(heads, -1)
    turned_HC = rows_HC[:, unrotated:]
    return torch.cat([rows_HC[:, :unrotated], turned_HC[:, 0::2], turned_HC[:, 1::2]], dim=1).flatten()


def _swap_halves(matrix: Tensor) -> Tensor:
    return matrix.roll(matrix.shape[1] // 2, dims=1)


def published_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all published tensors, in the order in which they are written."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in layout.targets():
        for part in target.parts:
            shape: Any = part.shape if part.index is None else (layout.model.num_experts, *part.shape)
            shapes[part.name] = shape
    return shapes
