"""Seconds of each segment of a layer for one micro-batch on one GPU, from operations and bytes.

    products         FLOPs / (peak x the share of the peak that a launch of this size reaches)
    attention        the same, with curves of its own; always in 16 bits
    memory           bytes that norms, residuals, activations, permutations and casts move / bandwidth
    launches         a gap for each kernel
    transfers        bytes / bandwidth (device.py, routing.py)

Each of these is an effect. A prediction without one shows what it costs (`plan estimate --explain`).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from ...expert_parallel.exchange import ALIGNMENT, round_up
from ...models.shape import LayerShape, Product
from ...overlap.pair_time import LayerSeconds
from .constants import read_constants
from .device import Device, gather
from .routing import all_to_all, assumed_factor, rows_sent
from .workload import ELEMENT, Workload

EFFECTS = (
    "products", "attention", "memory", "launches", "recomputation", "tensor transfers", "expert transfers",
    "imbalance", "host", "pipeline", "gradients", "optimizer",
)  # fmt: skip
"""Everything that makes a step longer than its FLOPs at the peak, in the order of `--explain`."""
ALL = frozenset(EFFECTS)

TILE = 128
"""Rows of a tile of a grouped product. The last tile of an expert is half full on average."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward relative to its forward: five products, one of which is computed again."""
TENSOR_EXPOSED = 0.6
"""Share of the transfers of tensor parallelism that the products beside them do not hide."""
CONTEXT_EXPOSED = 0.4
"""The same for keys and values that travel around the context-parallel ranks, beside attention. An assumption: on the
35 published runs with context parallelism, the mean error is 7.8% with 0 or 0.4, and 8.2% with 1. Pairs of this
project hide keys behind the other micro-batch, so they do not use it (overlap/pair_time.py)."""
FP8_BYTES = 3
"""Bytes moved to round a number to 8 bits where no copy is transposed: read 2, write 1."""
SCORE_BYTES = 16
"""Bytes moved for a score without flash attention, of the whole square: written, masked, softmax, dropout, read."""
KERNELS = {"gqa": 10, "mla": 20, "dense": 5, "experts": 22, "shared": 5}
"""Launches of a forward in 16 bits, apart from the products of attention; a backward has twice as many. mla has more
than gqa: two latents are split and normalized, and a part of each query and key is rotated and joined to the rest."""
DISPATCH_LAUNCHES = {"all_to_all": 28, "deepep": 18, "hybrid": 8}
"""Launches of a forward to dispatch and combine, besides KERNELS. all_to_all is counted in Megatron-LM's code
(megatron/core/transformer/moe/token_dispatcher.py): 8 to sum and gather counts, 4 to copy them to the CPU, 5 to
permute, 3 to transfer rows and weights, 7 to sort the rows by expert and back, 1 to join. The others are rougher:
DeepEP needs no counts of other ranks, and HybridEP permutes while it transfers. A rank with all experts takes those of
HybridEP."""
ROUTER = 10
"""Launches of the router and before dispatch, among those of the experts. Partial CUDA graphs replay them."""
EXPERT_LAUNCH = 0.2
"""CPU time of one expert's product relative to that of an operator: Transformer Engine launches the products of all
experts in a loop in C++ (nvte_multi_tensor_gemm), and Python only calls that loop."""
BIAS_BYTES, BIAS_LAUNCHES = 68 / 3, 8 / 3
"""If experts have biases: bytes moved for each number of their outputs, and launches for each expert. A third of those
of a step, because a backward counts twice. Megatron-LM adds bias x weight in fp32, expert by expert, outside of fused
kernels (`_apply_bias` in megatron/core/transformer/moe/experts.py). The forward moves 28 bytes: 4 for the product, 10
for the sum, 8 to join the experts, 6 to round. The backward moves 40: 12 for casts, 4 to join, and 24 for the gradients
of the bias and of the weight."""
FUSED_BYTES = 2
"""Bytes that a fused kernel writes for each inner activation of an expert: 1, and 1 for the transposed copy."""
NEVER_CAST = ("router", "shared_gate")
"""Products in 16 bits, even in a run with 8."""
NARROW_HEADS = 0.5
"""Exponent of the head width / 128 in the speed of attention. A score costs one exponential at any width, and a
multiprocessor computes 16 of them per cycle: in heads of 128, half as long as the products take, in heads of 64, as
long (arXiv 2407.08608). With 0.5, heads of 64 reach 0.71 of the FLOP/s of heads of 128. FlashAttention-4
on B200 reaches 708 of 1,062 TFLOP/s, or 0.67 (Dao-AILab/flash-attention#2605, 4,096 positions, causal)."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Converts FLOPs, bytes and launches to seconds. on: the effects that count."""

    device: Device
    precision: str
    on: Collection[str]

    def product(self, flops: float, precision: str | None = None, kind: str = "product") -> float:
        """Seconds of one product. kind: one of KINDS; attention is an effect of its own."""
        precision = precision or self.precision
        share = 1.0
        if flops and ("attention" if kind.startswith("attention") else "products") in self.on:
            share = self.device.share(kind, precision, flops)
        return flops / ((self.device.peak[precision] or 0.0) * share)

    def products(self, tokens: float, products: Iterable[Product]) -> float:
        """Products of `tokens` rows, in 8 bits if the run is, except those of the router."""
        return sum(self.product(tokens * one.flops, "bf16" if one.name in NEVER_CAST else None) for one in products)

    def grouped(self, flops: float, experts: float, fused: bool, precision: str | None = None) -> float:
        """One product for each of `experts` experts: launched one by one or, if `fused` and faster, in one launch."""
        one_by_one = experts * self.product(flops / experts, precision)
        return min(self.product(flops, precision, "grouped"), one_by_one) if fused else one_by_one

    def memory(self, num_bytes: float) -> float:
        return num_bytes / self.device.passes if "memory" in self.on else 0.0

    def launches(self, number: float) -> float:
        return number * self.device.launch if "launches" in self.on else 0.0


def layer_factors(load: Workload, on: Collection[str] = ALL) -> list[float]:
    """For each layer, the rows of the rank that gets the most, divided by the mean; 1 for layers without experts."""
    if "imbalance" not in on:
        return [1.0] * len(load.shape.layers)
    if load.loads is not None:
        return load.loads.factors(load.shape, load.layout.ep, load.experts)
    return [assumed_factor(one.experts, one.top_k, load.layout.ep, load.violation) for one in load.shape.layers]


def layer_seconds(load: Workload, layer: LayerShape, on: Collection[str] = ALL, factor: float = 1.0) -> LayerSeconds:
    """The segments of a layer. Transfers of tensor parallelism are part of attn and mlp, and so are keys in a ring.

    factor: of `layer_factors`.
    """
    clock = Clock(load.device, load.precision, on)
    attn, attn_w = _attention(load, layer, clock)
    mlp, mlp_w = _mlp(load, layer, clock, factor)
    around = _tensor_transfers(load, on)
    around_mlp = around
    if layer.experts and load.expert_tp > 1:
        # Ranks that divide each expert gather a row for each choice of a token, not one for each token. The router has
        # to choose first, so no product runs beside it.
        around_mlp = around * layer.top_k / TENSOR_EXPOSED
    elif layer.experts and not layer.shared_size:
        around_mlp = 0.0  # dispatch brings the rows of whole experts
    keys = _context_transfers(load, layer, on)
    ring = CONTEXT_EXPOSED * keys if load.opens == 1 else 0.0
    extra_attn, extra_mlp = _recomputed(load, attn[0] + around, mlp[0] + around_mlp, clock)
    transfers = _expert_transfers(load, layer, on, factor) if layer.experts else (0.0, 0.0, 0.0, 0.0)
    seconds = LayerSeconds(
        attn_f=attn[0] + around + ring, mlp_f=mlp[0] + around_mlp,
        attn_b=attn[1] + around + 2 * ring + extra_attn, mlp_b=mlp[1] + around_mlp + extra_mlp,
        attn_w=attn_w, mlp_w=mlp_w, dispatch_f=transfers[0], combine_f=transfers[1], combine_b=transfers[2],
        dispatch_b=transfers[3], host=_host(load, layer) if "host" in on else 0.0,
    )  # fmt: skip
    return seconds if load.opens == 1 else _with_keys(load, layer, clock, seconds, keys)


def _with_keys(load: Workload, layer: LayerShape, clock: Clock, whole: LayerSeconds, keys: float) -> LayerSeconds:
    """The same layer, with a gather of keys between the products that compute them and the rest of attention.

    From gathered latents, each rank computes the keys and values of all positions.
    """
    products = layer.attention.products(load.shape.hidden)
    after = [one for one in products if one.name in ("kv_up", "attention_out")]
    qkv = clock.products(load.rank_tokens, (one for one in products if one not in after))
    more = clock.products(load.rank_tokens * (load.layout.cp - 1), after[:-1])
    again = load.recompute in ("attention", "full") and "recomputation" in clock.on
    return replace(
        whole, qkv_f=qkv, qkv_b=(1 + again) * qkv, qkv_w=qkv, keys_f=keys, keys_b=keys,
        attn_f=whole.attn_f - qkv + more, attn_b=whole.attn_b + (1 + again) * (more - qkv),
        attn_w=whole.attn_w - qkv + more,
    )  # fmt: skip


def _launches(load: Workload, layer: LayerShape) -> tuple[int, int]:
    """Launches of a forward of attention, and of the MLP or the experts."""
    products, inner = layer.attention.products(load.shape.hidden), layer.mlp_products(load.shape.hidden)
    mlp = KERNELS["experts" if layer.experts else "dense"] + KERNELS["shared"] * (layer.shared_size > 0)
    alone = load.layout.ep * load.expert_tp == 1
    mlp += DISPATCH_LAUNCHES["hybrid" if alone else load.ep_backend] * (layer.experts > 0)
    attention = KERNELS[layer.attention.kind] + len(products)
    if load.eight_bits:  # the input of each product is rounded by a launch of its own
        attention += len(products)
        mlp += sum(one.name not in NEVER_CAST for one in inner)
    mlp += 2 * (layer.experts > 0 and load.fp8 != "off")  # rounds rows, and SwiGLU has a launch of its own
    return attention, mlp


def _host(load: Workload, layer: LayerShape) -> float:
    """Seconds of the CPU for a forward. Products of experts are launched one by one, as in Transformer Engine."""
    attention, mlp = _launches(load, layer)
    if load.cuda_graphs == "full":
        return 0.0
    graphed = attention + ROUTER * (layer.experts > 0) if load.cuda_graphs == "partial" else 0
    each = read_constants()["host"].get(load.device.cpu, 0.0) if load.host is None else load.host
    each_expert = EXPERT_LAUNCH * (1 + load.eight_bits + BIAS_LAUNCHES * layer.expert_bias)
    one_by_one = each_expert * (layer.experts // load.layout.ep)
    return each * (attention + mlp + one_by_one - graphed)


def head_seconds(load: Workload, on: Collection[str] = ALL) -> LayerSeconds:
    """The embedding lookup, the head and the loss."""
    clock, shape = Clock(load.device, load.precision, on), load.shape
    tokens = load.rank_tokens
    product = clock.product(2 * tokens * shape.hidden * shape.vocab, "bf16")
    passes = clock.memory(tokens * (8 * shape.vocab + 2 * ELEMENT * shape.hidden))  # logits in 16 and 32 bits
    return LayerSeconds(0.0, product + passes, 0.0, product + passes, 0.0, product)


Times = tuple[tuple[float, float], float]  # (forward, gradients of inputs), gradients of weights


def _attention(load: Workload, layer: LayerShape, clock: Clock) -> Times:
    tokens, hidden, attention = load.rank_tokens, load.shape.hidden, layer.attention
    products = attention.products(hidden)
    linear = clock.products(tokens, products)
    scores = tokens * attention.score_flops(load.seq)
    kernel = load.device.efficiency.flash2 if load.attention == "flash2" and "attention" in clock.on else 1.0
    kernel *= min(1.0, attention.v_dim / 128) ** NARROW_HEADS if "attention" in clock.on else 1.0
    forward, backward = (
        clock.product(scores * factor, "bf16", f"attention_{name}") / kernel
        for name, factor in (("forward", 1.0), ("backward", ATTENTION_BACKWARD))
    )
    width = sum(product.outputs for product in products)
    bytes_forward = tokens * (
        ELEMENT * (5 * hidden + 2 * width) + _casts(load, sum(product.inputs for product in products))
    )
    if load.attention == "plain":
        bytes_forward += tokens * SCORE_BYTES * attention.heads * load.seq / 2
    gaps = clock.launches(_launches(load, layer)[0])
    memory = clock.memory(bytes_forward)
    return (linear + forward + memory + gaps, linear + backward + 2 * memory + 2 * gaps), linear


def _mlp(load: Workload, layer: LayerShape, clock: Clock, factor: float) -> Times:
    """The dense MLP, or the router, the experts and the shared experts."""
    tokens, hidden, inner = load.rank_tokens, load.shape.hidden, layer.dense_size + layer.shared_size
    products = weight_gradients = clock.products(tokens, layer.mlp_products(hidden))
    every = ELEMENT * 5 * hidden + 12 * layer.experts + _activation_bytes(load, inner, hidden, layer.gated)
    moved = tokens * every
    if layer.experts:
        divided = load.expert_tp  # these ranks all have the rows of all their tokens
        rows, local = divided * tokens * layer.top_k * factor, layer.experts / load.layout.ep
        padding = (rows / local + TILE / 2) / (rows / local) if "products" in clock.on else 1.0
        fused = not load.experts_one_by_one
        sizes = [2 * rows * one.weights / divided for one in layer.expert_products(hidden)]
        products += padding * sum(clock.grouped(size, local, fused, load.expert_precision) for size in sizes)
        weight_gradients += padding * sum(clock.grouped(size, local, fused, load.precision) for size in sizes)
        inner = layer.expert_size // divided
        activation = _activation_bytes(load, inner, hidden, layer.gated)
        if load.fused_activation:
            activation = _casts(load, hidden) + FUSED_BYTES * inner
        moved += rows * (ELEMENT * 4 * hidden + activation)
        moved += layer.expert_bias * rows * (BIAS_BYTES * hidden + ELEMENT * inner * (1 + layer.gated) / 3)
        moved += (load.fp8 != "off") * FP8_BYTES * (divided * tokens * hidden + rows * inner)
    memory, gaps = clock.memory(moved), clock.launches(_launches(load, layer)[1])
    return (products + memory + gaps, products + 2 * memory + 2 * gaps), weight_gradients


def _activation_bytes(load: Workload, inner: int, hidden: int, gated: bool) -> int:
    """Bytes of a token's activation function, and of the casts to 8 bits before both products."""
    return ELEMENT * (2 + gated) * inner + _casts(load, hidden + inner) if inner else 0


def _casts(load: Workload, numbers: int) -> int:
    """Bytes moved to round `numbers` numbers to 8 bits: read 2, write 1, and 1 more for the transposed copy."""
    return 4 * numbers * load.eight_bits


def _recomputed(load: Workload, attn: float, mlp: float, clock: Clock) -> tuple[float, float]:
    """Seconds that recomputation adds to the backward of attention, and of the MLP."""
    if "recomputation" not in clock.on:
        return 0.0, 0.0
    norms = clock.memory(load.rank_tokens * 2 * ELEMENT * load.shape.hidden)
    added = {"none": (0.0, 0.0), "norms": (norms, norms), "attention": (attn, norms), "full": (attn, mlp)}
    return added[load.recompute]


# ---- Transfers ----


def _tensor_transfers(load: Workload, on: Collection[str]) -> float:
    """An all-gather before and a reduce-scatter after attention, or the MLP."""
    if "tensor transfers" not in on:
        return 0.0
    tp = load.layout.tp
    sequence = ELEMENT * load.rank_tokens * tp * load.shape.hidden  # bytes
    return TENSOR_EXPOSED * 2 * gather(load.device, sequence, tp, 1)


def _context_transfers(load: Workload, layer: LayerShape, on: Collection[str]) -> float:
    """Seconds to gather the keys and values of all context-parallel ranks, or their latents."""
    if "tensor transfers" not in on:
        return 0.0
    one, attention = load.layout, layer.attention
    heads = attention.kv_heads * (attention.qk_dim + attention.v_dim)
    width = heads if load.opens == 1 else attention.gathered
    return gather(load.device, ELEMENT * load.rank_tokens * one.cp * width, one.cp, one.tp)


def _expert_transfers(
    load: Workload, layer: LayerShape, on: Collection[str], factor: float
) -> tuple[float, float, float, float]:
    """dispatch and combine of the forward, then combine and dispatch of the backward."""
    if "expert transfers" not in on or load.layout.ep == 1:
        return (0.0, 0.0, 0.0, 0.0)
    device, hidden = load.device, load.shape.hidden
    rows = rows_sent(
        layer.experts, layer.top_k, load.layout.ep, device.domain.gpus or 1, load.ep_backend, layer.groups,
        layer.top_groups,
    )  # fmt: skip
    tokens = load.rank_tokens * factor
    wide = ELEMENT * hidden
    narrow = hidden + hidden // 32 if load.eight_bits and load.ep_backend != "all_to_all" else wide  # with scales
    first, other = (all_to_all(device, rows, tokens, width) for width in (narrow, wide))
    back = other
    if load.fp8 == "experts+dispatch":  # rows with their scales, and the gradients of outputs
        message = round_up(hidden + -(-hidden // load.fp8_block), ALIGNMENT)
        first = back = all_to_all(device, rows, tokens, message)
    # Without fused kernels, rows are copied once more on each side of a transfer.
    copies = Clock(device, load.precision, ALL).memory(4 * tokens * (rows.near + rows.far) * wide)
    copies = copies if load.ep_backend == "all_to_all" else 0.0
    return first + copies, other + copies, back + copies, other + copies
