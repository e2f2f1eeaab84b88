"""The sizes of a model that decide what its training costs: those of any dense or Mixture-of-Experts decoder.

`ModelConfig` describes the models that this project trains. A plan may also be for a model that it cannot train, with
sliding windows, GELU or learned positions. A `ModelShape` has only the sizes that FLOPs, parameters and activations
depend on. `shape_of` (costs.py) returns the shape of a `ModelConfig`; the planner reads those of published models.

Model FLOPs are those of the necessary matrix products, two for each multiply-add (arXiv 2204.02311, appendix B).
Recomputation, norms, the softmax and the embedding lookup do not count. A token's K experts and the shared experts
count. A backward counts as two forwards. Attention counts as causal: on average, a position attends to (S + 1) / 2 of S
positions. The paper counts all S, including the masked half.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple


class Product(NamedTuple):
    """A product of a token's row [inputs] with a matrix [inputs, outputs].

    count: how many of such products a token needs, with different matrices: top_k for routed experts.
    """

    name: str
    inputs: int
    outputs: int
    count: int = 1

    @property
    def weights(self) -> int:
        """The number of elements of one matrix."""
        return self.inputs * self.outputs

    @property
    def flops(self) -> int:
        """FLOPs per token, forward."""
        return 2 * self.weights * self.count


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Causal attention of one layer.

    gqa: grouped-query attention; multi-head attention if kv_heads equals heads.
    mla: multi-head latent attention; keys and values of all heads are computed from a latent of `kv_rank`, and queries
    from one of `q_rank`, if it is not 0.
    """

    kind: Literal["gqa", "mla"]
    heads: int
    kv_heads: int
    """Heads of keys and values; for mla, as many as heads."""
    qk_dim: int
    """Width of the queries and keys of one head; for mla with the rotated part."""
    v_dim: int
    """Width of the values of one head."""
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    """mla: width of the rotated part of queries and keys. All heads share the rotated key."""
    window: int = 0
    """A position attends to itself and the `window - 1` positions before it. 0: to all positions before it."""

    @property
    def gathered(self) -> int:
        """Numbers of a position that context-parallel ranks of this project gather: keys and values, or latents."""
        return self.kv_rank + self.rope_dim if self.kind == "mla" else self.kv_heads * (self.qk_dim + self.v_dim)

    def products(self, hidden: int) -> tuple[Product, ...]:
        """The projections, in order. The first products of MLA, of queries and of keys and values, are one."""
        out = Product("attention_out", self.heads * self.v_dim, hidden)
        queries = self.heads * self.qk_dim
        if self.kind == "gqa":
            return Product("qkv", hidden, queries + self.kv_heads * (self.qk_dim + self.v_dim)), out
        down = Product("latents", hidden, (self.q_rank or queries) + self.kv_rank + self.rope_dim)
        up = Product("kv_up", self.kv_rank, self.heads * (self.qk_dim - self.rope_dim + self.v_dim))
        return (down, Product("q_up", self.q_rank, queries), up, out) if self.q_rank else (down, up, out)

    def flops(self, hidden: int) -> int:
        """FLOPs of the projections per token, forward."""
        return sum(product.flops for product in self.products(hidden))

    def pairs(self, seq_len: int) -> int:
        """How many pairs of a query and a key there are in a sequence. Example: 3 positions, no window: 6."""
        near = min(self.window or seq_len, seq_len)
        return near * (near + 1) // 2 + (seq_len - near) * near

    def score_flops(self, seq_len: int) -> int:
        """FLOPs of scores and sums of values per token, forward: the average over the positions of a sequence."""
        return 2 * self.heads * (self.qk_dim + self.v_dim) * self.pairs(seq_len) // seq_len


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A transformer block: attention, then an MLP or experts."""

    attention: AttentionShape
    dense_size: int = 0
    """Inner width of a dense MLP. 0: none, the layer has experts."""
    gated: bool = True
    """Whether MLP and experts multiply two inner activations, as SwiGLU does: three matrices instead of two."""
    experts: int = 0
    top_k: int = 0
    expert_size: int = 0
    """Inner width of a routed expert."""
    shared_size: int = 0
    """Inner width of all shared experts together."""
    shared_gate: bool = False
    """Whether the output of the shared experts is multiplied by the sigmoid of a linear function of the token."""
    other: int = 0
    """Parameters outside of matrices: of norms, and biases."""
    groups: int = 1
    """Groups of consecutive experts: those of a token are in its best `top_groups` groups."""
    top_groups: int = 1
    expert_bias: bool = False
    """Whether the products of routed experts have biases."""

    def mlp_products(self, hidden: int) -> tuple[Product, ...]:
        """Products of every token: of the dense MLP, the router and the shared experts."""
        found = self._mlp("mlp", hidden, self.dense_size)
        if self.experts:
            found += (Product("router", hidden, self.experts),)
        found += self._mlp("shared", hidden, self.shared_size)
        return (*found, Product("shared_gate", hidden, 1)) if self.shared_gate else found

    def expert_products(self, hidden: int) -> tuple[Product, ...]:
        """Products of the routed experts: `count` experts for each token, with rows that dispatch has moved."""
        return self._mlp("expert", hidden, self.expert_size, self.top_k) if self.experts else ()

    def products(self, hidden: int) -> tuple[Product, ...]:
        return self.attention.products(hidden) + self.mlp_products(hidden) + self.expert_products(hidden)

    def _mlp(self, name: str, hidden: int, inner: int, count: int = 1) -> tuple[Product, ...]:
        if not inner:
            return ()
        first = Product(f"{name}_in", hidden, inner * (1 + self.gated), count)
        return first, Product(f"{name}_out", inner, hidden, count)

    def dense_parameters(self, hidden: int) -> int:
        """Parameters other than those of routed experts."""
        return self.other + sum(p.weights for p in self.attention.products(hidden) + self.mlp_products(hidden))

    def expert_parameters(self, hidden: int) -> int:
        """Parameters of all routed experts."""
        return self.experts * sum(p.weights for p in self.expert_products(hidden))

    def adapter_parameters(self, hidden: int, rank: int, targets: Collection[str]) -> tuple[int, int]:
        """Parameters of low-rank adapters (lora.py): of the routed experts, and of all else.

        targets: of LORA_TARGETS. Queries, keys and values have a pair of matrices each, as do the two latents of MLA,
        and gate and up of an MLP; those of an expert share one.
        """

        def size(products: Sequence[Product], first: int) -> int:
            return rank * sum(one.inputs * (first if i == 0 else 1) + one.outputs for i, one in enumerate(products))

        kinds = {
            "attention": size(self.attention.products(hidden), 3 if self.attention.kind == "gqa" else 2),
            "dense": size(self._mlp("mlp", hidden, self.dense_size), 1 + self.gated),
            "shared": size(self._mlp("shared", hidden, self.shared_size), 1 + self.gated),
            "router": rank * (hidden + self.experts) * (self.experts > 0),
        }  # fmt: skip
        others = sum(number for kind, number in kinds.items() if kind in targets)
        return self.experts * size(self.expert_products(hidden), 1) * ("experts" in targets), others

    def flops(self, hidden: int) -> int:
        """FLOPs of the matrix products per token, forward, without the scores of attention."""
        return sum(p.flops for p in self.products(hidden))

    def score_flops(self, seq_len: int) -> int:
        """FLOPs of attention's scores and sums of values, as `AttentionShape.score_flops`."""
        return self.attention.score_flops(seq_len)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a whole model. FLOPs are per token, for sequences of `seq_len`."""

    name: str
    hidden: int
    """Width of the residual stream."""
    vocab: int
    layers: tuple[LayerShape, ...]
    tied: bool = False
    """Whether the embedding and the head share one matrix."""
    mtp: int = 0
    """Modules of multi-token prediction: each has a block like the last layer, and a projection of two rows to one."""
    learned_positions: int = 0
    """Rows of the table of learned positions."""
    other: int = 0
    """Parameters outside of layers and matrices: of the last norm."""

    def block(self, index: int) -> LayerShape:
        """A layer or, after the last one, the block of an MTP module, which is like the last layer."""
        return self.layers[min(index, len(self.layers) - 1)]

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, which is only looked up."""
        return self.vocab * self.hidden

    @property
    def head(self) -> Product:
        return Product("head", self.hidden, self.vocab)

    @property
    def mtp_join(self) -> Product:
        """The projection of an MTP module."""
        return Product("mtp_join", 2 * self.hidden, self.hidden)

    def _sum(self, size: Callable[[LayerShape], int]) -> int:
        """The sum over all layers and MTP modules. There are few kinds of layers."""
        kinds = Counter(self.layers + self.layers[-1:] * self.mtp)
        return sum(number * size(layer) for layer, number in kinds.items())

    @cached_property
    def dense_parameters(self) -> int:
        """All parameters other than those of routed experts."""
        ends = self.embedding * (1 if self.tied else 2) + self.learned_positions * self.hidden + self.other
        modules = self.mtp * (self.mtp_join.weights + 3 * self.hidden)  # three norms
        return ends + modules + self._sum(lambda layer: layer.dense_parameters(self.hidden))

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts."""
        return self._sum(lambda layer: layer.expert_parameters(self.hidden))

    @property
    def parameters(self) -> int:
        return self.dense_parameters + self.expert_parameters

    @cached_property
    def active_parameters(self) -> int:
        """The parameters that one token uses, the embedding included."""
        return self.dense_parameters + self._sum(
            lambda layer: layer.top_k * sum(p.weights for p in layer.expert_products(self.hidden))
        )

    def score_flops(self, seq_len: int) -> int:
        """FLOPs of attention scores and sums of values of all layers, forward, without MTP."""
        return sum(n * layer.score_flops(seq_len) for layer, n in Counter(self.layers).items())

    def forward_flops(self, seq_len: int) -> int:
        """FLOPs of a forward, without multi-token prediction: the average over the positions of a sequence.

        Example: the preset `tiny` needs 2 x 822,272 for its weights. At 256 tokens attention adds 4 layers x 257 x 256.
        """
        layers = sum(n * layer.flops(self.hidden) for layer, n in Counter(self.layers).items())
        return layers + self.head.flops + self.score_flops(seq_len)

    def mtp_flops(self, seq_len: int) -> int:
        """FLOPs of multi-token prediction, forward, for a whole sequence: module k computes seq_len - k positions."""
        lengths = range(seq_len - self.mtp, seq_len)
        return sum(n * (self.mtp_module_flops + self.layers[-1].score_flops(n)) for n in lengths)

    @property
    def mtp_module_flops(self) -> int:
        """FLOPs of the matrix products of an MTP module per token, forward: its projection, its block, and the head."""
        return self.mtp_join.flops + self.layers[-1].flops(self.hidden) + self.head.flops

    def train_flops(self, seq_len: int) -> int:
        """FLOPs of a forward and a backward: three forwards, multi-token prediction included."""
        return 3 * (self.forward_flops(seq_len) + self.mtp_flops(seq_len) // seq_len)
