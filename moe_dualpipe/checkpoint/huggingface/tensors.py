"""Which published tensors make up each tensor of this model, as tables that serve both directions.

This model stacks matrices that are multiplied together: queries, keys and values; gate and up. Published models store
each matrix separately. So a tensor of this model is a list of `PublishedRows`, stacked
along the first dimension. The rows may be in another order: DeepSeek rotates channels (2i, 2i + 1) together, and this
model rotates channels (i, i + C/2).

Each row of a table has three columns: which models have the tensor (all of these words hold, see `_words`), our name,
and the published names, each with its shape in letters (`_sizes`). * stands for each expert in turn. Names in braces
depend on the architecture.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ...models import ModelConfig
from .architectures import Architecture

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_Rows = tuple[tuple[str, str, str], ...]
_START: _Rows = (("", "embedding.weight", f"{EMBEDDING} VD"),)
_END: _Rows = (("", "norm.weight", "model.norm.weight D"), ("untied", "head.weight", f"{HEAD} VD"))
_BLOCK: _Rows = (
    ("", "attention_norm.weight", "input_layernorm.weight D"),
    ("gqa", "attention.qkv.weight",
     "self_attn.q_proj.weight QD, self_attn.k_proj.weight KD, self_attn.v_proj.weight KD"),
    ("gqa qkv_bias", "attention.qkv.bias", "self_attn.q_proj.bias Q, self_attn.k_proj.bias K, self_attn.v_proj.bias K"),
    ("head_norms", "attention.q_norm.weight", "self_attn.q_norm.weight C"),
    ("head_norms", "attention.k_norm.weight", "self_attn.k_norm.weight C"),
    ("full_norms", "attention.q_norm.weight", "self_attn.q_norm.weight Q"),
    ("full_norms", "attention.k_norm.weight", "self_attn.k_norm.weight K"),
    ("mla q_latent", "attention.down.weight",
     "self_attn.q_a_proj.weight AD, self_attn.kv_a_proj_with_mqa.weight PD"),
    ("mla no_q_latent", "attention.down.weight",
     "self_attn.q_proj.weight UD, self_attn.kv_a_proj_with_mqa.weight PD"),
    ("mla q_latent qkv_bias", "attention.bias", "self_attn.q_a_proj.bias A, self_attn.kv_a_proj_with_mqa.bias P"),
    ("mla no_q_latent qkv_bias", "attention.bias", "self_attn.kv_a_proj_with_mqa.bias P"),
    ("mla q_latent", "attention.q_norm.weight", "self_attn.q_a_layernorm.weight A"),
    ("mla q_latent", "attention.q_up.weight", "self_attn.q_b_proj.weight UA"),
    ("mla", "attention.kv_norm.weight", "self_attn.kv_a_layernorm.weight B"),
    ("mla", "attention.kv_up.weight", "self_attn.kv_b_proj.weight WB"),
    ("", "attention.out.weight", "self_attn.o_proj.weight DO"),
    ("out_bias", "attention.out.bias", "self_attn.o_proj.bias D"),
    ("", "mlp_norm.weight", "post_attention_layernorm.weight D"),
    ("dense", "mlp.gate_up.weight", "mlp.gate_proj.weight ID, mlp.up_proj.weight ID"),
    ("dense", "mlp.down.weight", "mlp.down_proj.weight DI"),
    ("routed", "mlp.router.logits.weight", "{mlp}.gate.weight ED"),
    ("routed router_bias", "mlp.router.bias_E", "{mlp}.gate.e_score_correction_bias E"),
    ("routed", "mlp.experts.gate_up.*", "{mlp}.experts.*.{gate}.weight FD, {mlp}.experts.*.{up}.weight FD"),
    ("routed", "mlp.experts.down.*", "{mlp}.experts.*.{down}.weight DF"),
)  # fmt: skip
_SHARED: _Rows = (
    ("routed shared", "mlp.shared.gate_up.weight",
     "{mlp}.{shared}.gate_proj.weight SD, {mlp}.{shared}.up_proj.weight SD"),
    ("routed shared", "mlp.shared.down.weight", "{mlp}.{shared}.down_proj.weight DS"),
    ("routed shared_gate", "mlp.shared_gate.weight", "{mlp}.{shared}_gate.weight 1D"),
)  # fmt: skip
_MTP: _Rows = (
    ("", "token_norm.weight", "enorm.weight D"), ("", "hidden_norm.weight", "hnorm.weight D"),
    ("", "join.weight", "eh_proj.weight DJ"), ("", "norm.weight", "shared_head.norm.weight D"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """Rows of a tensor of this model, as a published tensor.

    name, shape: of the published tensor. order: for each row of this model, the index of the published row. swapped:
    the left and right halves of the columns are exchanged.
    """

    name: str
    shape: tuple[int, ...]
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
    """A tensor of this model, by its global name, and its parts in the order of its rows.

    expert: whether it belongs to a routed expert.
    """

    name: str
    parts: tuple[PublishedRows, ...]
    expert: bool = False

    @property
    def heights(self) -> list[int]:
        """The number of rows of each part."""
        return [part.shape[0] for part in self.parts]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.heights), *self.parts[0].shape[1:])


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The published tensors of one model. interleaved: rotations pair channels (2i, 2i + 1)."""

    model: ModelConfig
    architecture: Architecture
    interleaved: bool = False

    def targets(self) -> Iterator[Target]:
        """All tensors of the model, in the order of its layers."""
        yield from self._targets(_START, "", "", set())
        for layer in range(self.model.num_layers):
            words = self._words(layer)
            yield from self._targets(_BLOCK + _SHARED, f"layers.{layer}.", f"model.layers.{layer}.", words)
        yield from self._targets(_END, "", "", set() if self.model.tied_embeddings else {"untied"})
        for k, layer in enumerate(self.model.mtp_blocks):
            yield from self._targets(_MTP, f"mtp.{k}.", f"model.layers.{layer}.", set())
            words = self._words(layer)
            yield from self._targets(_BLOCK + _SHARED, f"mtp.{k}.block.", f"model.layers.{layer}.", words)

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
        kind = self.architecture.shared
        words = {"none": set(), "counted": {"routed", "shared"}, "sized": {"routed", "shared", "shared_gate"}}[kind]
        blocks = [] if self.model.num_shared_experts else self.model.routed_blocks()
        targets = (one for layer in blocks for one in self._targets(_SHARED, "", f"model.layers.{layer}.", words))
        return {part.name: part.shape for target in targets for part in target.parts}

    def _words(self, layer: int) -> set[str]:
        """The words of the first column of the tables that hold for a layer."""
        model = self.model
        held = {
            model.attention: True, f"{model.qk_norm}_norms": model.attention == "gqa", "q_latent": model.q_rank > 0,
            "no_q_latent": model.q_rank == 0, "qkv_bias": model.qkv_bias, "out_bias": model.out_bias,
            "dense": model.is_dense(layer), "routed": not model.is_dense(layer), "router_bias": model.router_bias,
            "shared": model.num_shared_experts > 0,
            "shared_gate": model.shared_gate,
        }  # fmt: skip
        return {word for word, holds in held.items() if holds}

    def _sizes(self) -> dict[str, int]:
        """The letters of the tables."""
        model, heads = self.model, self.model.num_heads
        width = model.value_dim if model.attention == "mla" else model.head_dim
        return {
            "1": 1, "V": model.vocab_size, "D": model.hidden_size, "J": 2 * model.hidden_size, "I": model.dense_size,
            "E": model.num_experts, "F": model.expert_size,
            "S": model.num_shared_experts * model.expert_size, "C": model.head_dim, "Q": heads * model.head_dim,
            "K": model.num_kv_heads * model.head_dim, "O": heads * width, "A": model.q_rank, "B": model.kv_rank,
            "P": model.kv_rank + model.rope_dim, "U": heads * (model.head_dim + model.rope_dim),
            "W": heads * (model.head_dim + model.value_dim),
        }  # fmt: skip

    def _targets(self, rows: _Rows, ours: str, theirs: str, words: set[str]) -> Iterator[Target]:
        model, architecture, sizes = self.model, self.architecture, self._sizes()
        gate, up, down = architecture.matrices
        names = {"mlp": architecture.mlp, "shared": architecture.shared_name}
        names |= {"gate": gate, "up": up, "down": down}
        orders: dict[str, Tensor] = {}
        if self.interleaved:
            orders["U"] = rotary_order(model.num_heads, model.head_dim, model.rope_dim)
            orders["P"] = rotary_order(1, model.kv_rank, model.rope_dim)
        for needed, name, published in rows:
            if not {*needed.split()} <= words:
                continue
            for expert in map(str, range(model.num_experts) if "*" in name else ("",)):
                parts = []
                for part in published.format(**names).replace("*", expert).split(", "):
                    part, letters = part.split(" ")
                    shape = tuple(sizes[letter] for letter in letters)
                    order = orders.get(letters[0])
                    parts.append(PublishedRows(theirs + part, shape, order, swapped=letters == "DJ"))
                yield Target(ours + name.replace("*", expert), tuple(parts), "*" in name)


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


def published_shapes(layout: TensorLayout) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all published tensors, in the order in which they are written."""
    return {part.name: part.shape for target in layout.targets() for part in target.parts}
