"""Activation bytes of a micro-batch on a stage: saved for backward, deferred from I to W, and needed in a backward.

Activations are most of the memory of training. They depend on the sizes of the model, on what is recomputed, and on how
the experts are spread. The formulas here add up the sizes of the tensors that layers save, so no model is built.
tests/gpu/test_saved_bytes.py compares them with the tensors that are alive in real stages.

They assume GPU kernels: fused experts (which save x and z), fused RMSNorm (its input and one number per row), flash
attention (q, k, v, the result, and one number per row and head). Plain operators (`plain`) save more. The number of
received rows assumes that tokens choose experts evenly and independently. Tables of a few bytes per expert are not
counted. MLPs and experts without a gate count as gated ones of half their width, which save as much.

T tokens, D model dim, K experts per token, N rows received, M = T K rows in expert-major order, F inner width.
"""

import math
from dataclasses import dataclass

from ..expert_parallel.exchange import ALIGNMENT, ROW_ALIGNMENT, buffer_rows, round_up
from ..models.config import Recompute
from ..models.partition import StageSpec
from ..models.shape import AttentionShape, LayerShape, ModelShape


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of a rank, and how the layers compute it.

    sequences, seq_len: its size. element: bytes of one number of an activation. ep: ranks that share the experts.

    tp: this project runs no tensor parallelism, but plans may have it: tp ranks share each matrix and, between
    products, the tokens (sequence parallelism). cp ranks share each sequence. Both divide every activation.

    flash: attention in one kernel, which does not save its scores. fp8: inputs and output gradients of matrix products
    are saved in 8 bits. fp8_block: numbers of a row with one scale, if only the experts compute in 8 bits; 0: they do
    not. plain: operators of torch, as on a CPU, instead of GPU kernels. load: the expert choices that this rank
    receives, divided by the mean over ranks. qk_norm, fp32_router: as in `ModelConfig`; plans leave out the few bytes
    per token that they cost. frozen: only low-rank adapters are trained.
    """

    sequences: int
    seq_len: int
    element: int = 2
    ep: int = 1
    recompute: Recompute = "none"
    fused_loss: bool = False
    tp: int = 1
    cp: int = 1
    flash: bool = True
    fp8: bool = False
    plain: bool = False
    load: float = 1.0
    fp8_block: int = 0
    qk_norm: str = "none"
    fp32_router: bool = False
    frozen: bool = False

    @property
    def scaled(self) -> bool:
        """Whether a norm saves a copy of its output before the scale, for the gradient of the scale."""
        return self.plain and not self.frozen

    @property
    def tokens(self) -> int:
        """Tokens of one rank."""
        return self.sequences * self.seq_len // (self.tp * self.cp)

    @property
    def operand(self) -> int:
        """Bytes of one number of an input or an output gradient of a matrix product."""
        return 1 if self.fp8 else self.element

    @property
    def recomputes_attention(self) -> bool:
        return self.recompute in ("attention", "full")


def rows_received(layer: LayerShape, batch: MicroBatch) -> int:
    """N: a token is sent once to each rank that holds any of its experts. With even loads, a rank receives as many rows
    as it sends; with uneven loads, in proportion to its load, but at most one row per token.

    Example: 2 of 4 experts on 2 ranks: both are on one rank in 2 of 6 cases, so 100 tokens make 167 rows.
    """
    experts, k = layer.experts, layer.top_k
    missed = math.comb(experts - experts // batch.ep, k) / math.comb(experts, k)
    return round(batch.tokens * batch.ep * min(1, (1 - missed) * batch.load))


def choices_received(layer: LayerShape, batch: MicroBatch) -> int:
    """M: rows in expert-major order."""
    return round(batch.tokens * layer.top_k * batch.load)


# ---- Saved from forward to backward ----


def saved_bytes(shape: ModelShape, spec: StageSpec, batch: MicroBatch) -> int:
    """Bytes that a stage saves between a micro-batch's forward and backward, including its input and output.

    Modules of multi-token prediction count as further layers.
    """
    row = batch.tokens * shape.hidden * batch.element
    saved = row + 8 * batch.tokens * spec.embedding
    saved += sum(block_bytes(shape, spec, index, batch) for index in spec.blocks)
    inputs = sum(_product_inputs(shape, shape.block(index), batch) for index in spec.blocks)
    saved -= (batch.element - batch.operand) * inputs
    if not spec.head:
        return saved + row * (batch.ep > 1 or not batch.plain)  # pairs that do not overlap drop their output
    saved += (2 + batch.scaled) * row + 4 * batch.tokens  # the sum of the parts, and its normalized copy
    per_token = 4 if batch.fused_loss else 4 * shape.vocab  # the log-sum-exp, or all log-probabilities
    return saved + batch.tokens * (per_token + 8)  # and the labels


def block_bytes(shape: ModelShape, spec: StageSpec, index: int, batch: MicroBatch) -> int:
    """Bytes that block `index` of a stage saves, without the input of the stage."""
    layer, tokens, row = shape.block(index), batch.tokens, batch.tokens * shape.hidden * batch.element
    first, last, dense = index == spec.blocks[0], index == spec.blocks[-1], not layer.experts
    shared, recompute = layer.shared_size > 0, batch.recomputes_attention
    # Recomputed attention saves the parts of its input, other attention their sum.
    saved = row * (1 + shared) * (not last) if recompute else row * (not first)
    if not recompute or not last or dense or (shared and batch.recompute == "attention"):
        saved += row  # the residual stream between attention and MLP
    if not recompute:
        saved += _attention_bytes(layer.attention, batch) + _unfused_bytes(layer.attention, batch)
    if batch.recompute == "none":
        saved += 2 * ((1 + batch.scaled) * row + 4 * tokens)  # two normalized copies; plain ones are scaled separately
    if dense:
        return saved + (0 if batch.recompute == "full" else _swiglu(_inner(layer, layer.dense_size), batch))
    if not recompute:
        saved += tokens * (_logits(layer, batch) + 8 * layer.top_k)  # logits and choices
        saved += tokens * 8 * layer.experts * batch.plain  # the order of the scores
    if batch.recompute == "full" and shared:
        saved += row  # the input of the shared experts
    if batch.recompute != "full":
        saved += _swiglu(_inner(layer, layer.shared_size), batch)
        saved += (row + tokens * batch.element) * layer.shared_gate  # the output of the experts, and of the gate
    has_input = batch.recompute == "none" or (batch.recompute == "full" and shared)
    return saved + _experts(shape, layer, batch, has_input)


def _attention_bytes(one: AttentionShape, batch: MicroBatch) -> int:
    """Bytes that attention in fused kernels saves, without the layer's input."""
    queries, values = one.heads * one.qk_dim, one.heads * one.v_dim
    if one.kind == "mla":
        # The latents before and after their norms; keys and values; queries and keys; the result in both layouts.
        numbers = (one.q_rank or queries) + one.q_rank + 2 * one.kv_rank + one.rope_dim
        numbers += one.heads * (one.qk_dim - one.rope_dim) + values + 2 * queries + 2 * values
        norms = 1 + (one.q_rank > 0)
    else:
        # The output of the qkv projection (values are a view of it); rotated queries and keys; the result.
        numbers = 2 * queries + 3 * one.kv_heads * one.qk_dim + values
        norms = {"none": 0, "head": one.heads + one.kv_heads, "full": 2}[batch.qk_norm]
    return batch.tokens * (numbers * batch.element + 4 * (one.heads + norms))


def _unfused_bytes(one: AttentionShape, batch: MicroBatch) -> int:
    """Bytes that attention saves beyond that with operators of torch, and without flash attention."""
    both, numbers = one.heads + one.kv_heads, 0
    if batch.plain and one.kind == "mla":
        numbers = one.q_rank + one.kv_rank  # normalized latents
    elif batch.plain:  # normalized queries and keys; those of each head are also copied to another layout
        numbers = {"none": 0, "head": both + one.heads, "full": both}[batch.qk_norm] * one.qk_dim
    # Scores before and after dropout, and its mask.
    scores = 0 if batch.flash else (2 * batch.element + 1) * one.heads * batch.seq_len
    return batch.tokens * (numbers * batch.element + scores)


def _product_inputs(shape: ModelShape, layer: LayerShape, batch: MicroBatch) -> int:
    """Numbers that a block saves only as the inputs of matrix products."""
    tokens, hidden, attention = batch.tokens, shape.hidden, layer.attention
    numbers = rows_received(layer, batch) * hidden if layer.experts and batch.ep > 1 else 0
    numbers += tokens * _inner(layer, layer.dense_size or layer.shared_size) * (batch.recompute != "full")
    numbers += tokens * attention.heads * attention.v_dim * (not batch.recomputes_attention)
    return numbers + 2 * tokens * hidden * (batch.recompute == "none")  # two normalized copies


def _inner(layer: LayerShape, size: int) -> int:
    return size if layer.gated else size // 2


def _logits(layer: LayerShape, batch: MicroBatch) -> int:
    """Bytes of a token's router logits, or of their gradient."""
    return layer.experts * (max(4, batch.element) if batch.fp32_router else batch.element)


def _swiglu(inner: int, batch: MicroBatch) -> int:
    """Gate and up, silu(gate), and silu(gate) * up, in the plain implementation."""
    return 4 * inner * batch.tokens * batch.element


def _experts(shape: ModelShape, layer: LayerShape, batch: MicroBatch, has_input: bool) -> int:
    """Received rows, z of the experts, and indices. has_input: with ep 1, the rows are already counted."""
    tokens, k, rows = batch.tokens, layer.top_k, rows_received(layer, batch)
    hidden, inner = shape.hidden, _inner(layer, layer.expert_size)
    choices, full = choices_received(layer, batch), batch.recompute == "full"
    saved = 8 * choices + 4 * rows * k  # the expert-major order
    if batch.ep == 1:
        saved += 4 * choices  # weights
        has_input = has_input or (batch.plain and not full)
        saved += 0 if has_input else tokens * hidden * batch.element
    else:
        fields = round_up(hidden * batch.element, ALIGNMENT) + 2 * round_up(4 * k, ALIGNMENT)
        saved += buffer_rows(rows) * round_up(fields, ROW_ALIGNMENT)  # the message
        saved += 4 * tokens * (min(k, batch.ep) + k)  # the destinations of rows, and their places after combine
        saved += 0 if full else 4 * rows * k  # weights, unpacked from the message
    numbers = 2 * inner
    if batch.fp8_block:  # also rows in 8 bits with their scales
        saved += rows * (hidden + 4 * -(-hidden // batch.fp8_block)) * (not full)
    elif batch.plain:  # also sorted rows, silu(gate), silu(gate) * up, and the rows before their sum
        numbers += 2 * (hidden + inner)
    return saved + (0 if full else numbers * choices * batch.element)


# ---- Saved from I to W of a split backward ----


def deferred_bytes(shape: ModelShape, spec: StageSpec, batch: MicroBatch) -> int:
    """Bytes saved from I to W of a split backward: the inputs and output gradients of the matrix products.

    With fp8, both are in 8 bits, except those of the head.
    """
    layers = [shape.block(index) for index in spec.blocks]
    blocks = (deferred_attention(shape, layer, batch) + deferred_mlp(shape, layer, batch) for layer in layers)
    return sum(blocks) + deferred_head(shape, spec, batch)


def deferred_head(shape: ModelShape, spec: StageSpec, batch: MicroBatch) -> int:
    return batch.tokens * (shape.hidden + shape.vocab) * batch.element * spec.head


def deferred_attention(shape: ModelShape, layer: LayerShape, batch: MicroBatch) -> int:
    """`deferred_bytes` of the attention of a block, with the layer's input and output gradient."""
    products = layer.attention.products(shape.hidden)
    # Products with the same input save it once: queries, keys and values, or their latents.
    numbers = sum(one.inputs + one.outputs for one in products)
    return batch.tokens * numbers * batch.operand


def deferred_mlp(shape: ModelShape, layer: LayerShape, batch: MicroBatch) -> int:
    """`deferred_bytes` of the MLP or the experts of a block."""
    tokens, hidden, k = batch.tokens, shape.hidden, layer.top_k
    inner = _inner(layer, layer.dense_size or layer.shared_size)
    numbers = tokens * (2 * hidden + 3 * inner)
    if not layer.experts:
        return numbers * batch.operand
    rows, choices = rows_received(layer, batch), choices_received(layer, batch)
    numbers += 2 * choices * hidden * batch.plain  # sorted inputs and output gradients
    numbers += tokens * (hidden + 1) * layer.shared_gate  # gradients before the gate, and of the gate
    # A recomputed router has its own input, not the tensor that the experts get.
    numbers += tokens * hidden * batch.recomputes_attention
    numbers += 2 * rows * hidden * (batch.ep > 1) + 3 * _inner(layer, layer.expert_size) * choices
    indices = 8 * choices + 4 * k * rows
    return numbers * batch.operand + indices + tokens * _logits(layer, batch)


# ---- Needed only while a backward runs ----
#
# A backward frees what the forward has saved, from the last block to the first. On the way it allocates gradients of
# activations, and what it recomputes. The peak is at the loss, which needs two tensors as large as the logits; or in
# the MLP or the attention of a block, if what they need is more than what the blocks after it have freed.
#
# The numbers of rows follow from the order of the operators of plain torch. Kernels that fuse operators need less.


def working_bytes(shape: ModelShape, spec: StageSpec, batch: MicroBatch, deferring: bool = False) -> int:
    """How many bytes a backward of a stage needs at its peak, beyond `saved_bytes`.

    deferring: weight gradients are deferred, so that what they need replaces what is freed.
    """
    chunk = min(batch.tokens, 1024) if batch.fused_loss else batch.tokens
    most = 8 * chunk * shape.vocab * spec.head  # gradients of log-probabilities and of logits, in fp32
    # The gradient of the stage's output exists until the end. That of the logits is also deferred: it counts there.
    width = shape.vocab if spec.head and not batch.fused_loss else shape.hidden
    kept = deferring and spec.head and not batch.fused_loss
    output = 0 if kept else batch.tokens * width * batch.element
    freed = saved_bytes(shape, spec, batch) - batch.tokens * (shape.hidden * batch.element + 8 * spec.embedding)
    freed -= sum(block_bytes(shape, spec, index, batch) for index in spec.blocks) + output
    freed -= deferred_head(shape, spec, batch) * deferring
    for index in reversed(spec.blocks):
        layer = shape.block(index)
        most = max(most, mlp_working(shape, layer, batch) - freed)
        freed += block_bytes(shape, spec, index, batch) - deferred_mlp(shape, layer, batch) * deferring
        most = max(most, attention_working(shape, layer, batch) - freed)
        freed -= deferred_attention(shape, layer, batch) * deferring
    return most


def mlp_working(shape: ModelShape, layer: LayerShape, batch: MicroBatch) -> int:
    """Bytes that the backward of an MLP or of experts needs at its peak, beyond what its block has saved."""
    hidden, full, again = shape.hidden, batch.recompute == "full", 1 + batch.plain
    k = layer.top_k * batch.load  # rows of experts for each token
    if not layer.experts:
        inner = _inner(layer, layer.dense_size)
        most = max(2 * inner + hidden, 3 * hidden * (batch.recompute in ("norms", "attention")))
        most += full * (4 * inner + again * hidden)
        largest = 2 * inner * hidden
    else:
        inner, shared = _inner(layer, layer.expert_size), _inner(layer, layer.shared_size)
        most = max((2 * k + 1) * hidden, 2 * k * inner - hidden)
        most += full * (k * (again * hidden + 4 * inner) + hidden * (shared > 0)) - 4 * shared * (not full)
        most = max(most, 2 * shared + hidden + 4 * shared * full)
        largest = 2 * inner * hidden * layer.experts // batch.ep
    operands = 4 * largest * batch.plain  # kernels add to gradients in place
    if batch.plain and batch.fp8_block and layer.experts:
        most = max(most, k * (hidden + 8 * inner))
        operands = 3 * operands + round(8 * batch.tokens * k * inner)  # weights and rows are read back into fp32
    return max(round(batch.tokens * most) * batch.element, operands)


def attention_working(shape: ModelShape, layer: LayerShape, batch: MicroBatch) -> int:
    """Bytes that a block needs at the peak of its attention's backward, after its MLP has been freed."""
    one = layer.attention
    gradients = 2 * (one.heads + one.kv_heads) * one.qk_dim
    if one.kind == "mla":
        gradients = one.heads * (2 * one.qk_dim + one.v_dim)
    rows = (6 - (not layer.experts)) * shape.hidden
    return _attention_bytes(one, batch) + batch.tokens * (rows + gradients) * batch.element
