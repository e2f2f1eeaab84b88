"""Activation bytes of a micro-batch on a stage: saved for backward, deferred from I to W, and needed in a backward.

Activations are most of the memory of training. They depend on the model, on what is recomputed, and on how the experts
are spread. The formulas here add up the sizes of the tensors that layers save, so no model is built.
tests/gpu/test_saved_bytes.py compares them with the tensors that are alive in real stages.

They assume GPU kernels: fused experts (which save x and z), fused RMSNorm (its input and one number per row), flash
attention (q, k, v, the result, and one number per row and head). Plain operators (`plain`) save more. The number of
received rows assumes that tokens choose experts evenly and independently. Tables of a few bytes per expert are not
counted.

T tokens, D model dim, K experts per token, N rows received, M = T K rows in expert-major order, F inner width.
"""

import math
from dataclasses import dataclass

from ..expert_parallel.exchange import ALIGNMENT, ROW_ALIGNMENT, buffer_rows, round_up
from ..models.attention import attention_costs
from ..models.config import ModelConfig, Recompute
from ..models.partition import StageSpec


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of a rank. element: bytes of one number of an activation. ep: ranks that share the experts.

    This project runs neither tensor nor context parallelism, but plans may have them. tp: ranks that share each matrix;
    between products, they share the tokens (sequence parallelism). cp: ranks that share each sequence. Both divide
    every activation. flash: attention in one kernel, which does not save its scores.
    fp8: inputs and output gradients of matrix products are saved in 8 bits. plain: operators of torch, as on a CPU,
    instead of GPU kernels.
    load: the expert choices that this rank receives, divided by the mean over ranks.
    fp8_block: numbers of a row with one scale, in experts that save x in 8 bits. 0: experts in another precision.
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

    @property
    def tokens(self) -> int:
        """Tokens of one rank."""
        return self.sequences * self.seq_len // (self.tp * self.cp)

    @property
    def operand(self) -> int:
        """Bytes of one number of an input or an output gradient of a matrix product."""
        return 1 if self.fp8 else self.element


def rows_received(config: ModelConfig, batch: MicroBatch) -> int:
    """N: a token is sent once to each rank that holds any of its experts. With even loads, a rank receives as many rows
    as it sends; with uneven loads, in proportion to its load, but at most one row per token.

    Example: 2 of 4 experts on 2 ranks: both are on one rank in 2 of 6 cases, so 100 tokens make 167 rows.
    """
    experts, k = config.num_experts, config.experts_per_token
    missed = math.comb(experts - experts // batch.ep, k) / math.comb(experts, k)
    return round(batch.tokens * batch.ep * min(1, (1 - missed) * batch.load))


def choices_received(config: ModelConfig, batch: MicroBatch) -> int:
    """M: rows in expert-major order."""
    return round(batch.tokens * config.experts_per_token * batch.load)


def saved_bytes(config: ModelConfig, spec: StageSpec, batch: MicroBatch) -> int:
    """Bytes that a stage saves between a micro-batch's forward and backward, including its input and output.

    Custom experts and routers count like built-in ones. Modules of multi-token prediction do not count.
    """
    row = batch.tokens * config.hidden_size * batch.element
    saved = row + 8 * batch.tokens * spec.embedding
    saved += sum(block_bytes(config, spec, layer, batch) for layer in spec.layers)
    saved -= (batch.element - batch.operand) * sum(_product_inputs(config, layer, batch) for layer in spec.layers)
    if not spec.head:
        return saved + row * (batch.ep > 1 or not batch.plain)  # pairs that do not overlap drop their output
    saved += (2 + batch.plain) * row + 4 * batch.tokens  # the sum of the parts, and its normalized copy
    per_token = 4 if batch.fused_loss else 4 * config.vocab_size  # the log-sum-exp, or all log-probabilities
    return saved + batch.tokens * (per_token + 8)  # and the labels


def block_bytes(config: ModelConfig, spec: StageSpec, layer: int, batch: MicroBatch) -> int:
    """Bytes that a block saves, without the input of the stage."""
    tokens, row = batch.tokens, batch.tokens * config.hidden_size * batch.element
    first, last, dense = layer == spec.layers[0], layer == spec.layers[-1], config.is_dense(layer)
    shared = not dense and config.num_shared_experts > 0
    recompute = batch.recompute in ("attention", "full")
    # Recomputed attention saves the parts of its input, other attention their sum.
    saved = row * (1 + shared) * (not last) if recompute else row * (not first)
    if not recompute or not last or dense or (shared and batch.recompute == "attention"):
        saved += row  # the residual stream between attention and MLP
    if not recompute:
        saved += attention_costs(config).saved_bytes(config, tokens, batch.element) + _scores(config, batch)
        saved += tokens * batch.element * _normed_width(config) * batch.plain
    if batch.recompute == "none":
        saved += 2 * ((1 + batch.plain) * row + 4 * tokens)  # two normalized copies; plain ones are scaled separately
    if dense:
        return saved + (0 if batch.recompute == "full" else _swiglu(config.dense_size, batch))
    if not recompute:
        saved += tokens * (_logits(config, batch) + 8 * config.experts_per_token)  # logits and choices
        saved += tokens * 8 * config.num_experts * batch.plain  # the order of the scores
    if batch.recompute == "full" and shared:
        saved += row  # the input of the shared experts
    if batch.recompute != "full":
        saved += _swiglu(config.num_shared_experts * config.expert_size, batch)
        saved += (row + batch.tokens * batch.element) * config.shared_gate  # the output of the experts, and of the gate
    has_input = batch.recompute == "none" or (batch.recompute == "full" and shared)
    return saved + _experts(config, batch, has_input)


def _product_inputs(config: ModelConfig, layer: int, batch: MicroBatch) -> int:
    """Numbers that a block saves only as the inputs of matrix products."""
    tokens, hidden, dense = batch.tokens, config.hidden_size, config.is_dense(layer)
    inner = config.dense_size if dense else config.num_shared_experts * config.expert_size
    width = config.value_dim if config.attention == "mla" else config.head_dim
    numbers = 0 if dense or batch.ep == 1 else rows_received(config, batch) * hidden
    numbers += tokens * inner * (batch.recompute != "full")
    numbers += tokens * config.num_heads * width * (batch.recompute in ("none", "norms"))
    return numbers + 2 * tokens * hidden * (batch.recompute == "none")  # two normalized copies


def _scores(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of the scores that attention saves without flash attention: before and after dropout, and its mask."""
    return 0 if batch.flash else (2 * batch.element + 1) * config.num_heads * batch.tokens * batch.seq_len


def _logits(config: ModelConfig, batch: MicroBatch) -> int:
    """Bytes of a token's router logits, or of their gradient."""
    return config.num_experts * (max(4, batch.element) if config.router_dtype == "float32" else batch.element)


def _swiglu(inner: int, batch: MicroBatch) -> int:
    """Gate and up, silu(gate), and silu(gate) * up, in the plain implementation."""
    return 4 * inner * batch.tokens * batch.element


def _experts(config: ModelConfig, batch: MicroBatch, has_input: bool) -> int:
    """Received rows, z of the experts, and indices. has_input: with ep 1, the rows are already counted."""
    tokens, k, rows = batch.tokens, config.experts_per_token, rows_received(config, batch)
    choices, full = choices_received(config, batch), batch.recompute == "full"
    saved = 8 * choices + 4 * rows * k  # the expert-major order
    if batch.ep == 1:
        saved += 4 * choices  # weights
        has_input = has_input or (batch.plain and not full)
        saved += 0 if has_input else tokens * config.hidden_size * batch.element
    else:
        fields = round_up(config.hidden_size * batch.element, ALIGNMENT) + 2 * round_up(4 * k, ALIGNMENT)
        saved += buffer_rows(rows) * round_up(fields, ROW_ALIGNMENT)  # the message
        saved += 4 * tokens * (min(k, batch.ep) + k)  # the destinations of rows, and their places after combine
        saved += 0 if full else 4 * rows * k  # weights, unpacked from the message
    inner = 2 * config.expert_size
    if batch.fp8_block:  # also rows in 8 bits with their scales
        saved += rows * (config.hidden_size + 4 * -(-config.hidden_size // batch.fp8_block)) * (not full)
    elif batch.plain:  # also sorted rows, silu(gate), silu(gate) * up, and the rows before their sum
        inner += 2 * (config.hidden_size + config.expert_size)
    return saved + (0 if full else inner * choices * batch.element)


def _normed_width(config: ModelConfig) -> int:
    """Numbers of a token that attention normalizes: queries and keys, or latents. Normalized heads also lead to a copy
    of the result in another layout."""
    if config.attention == "mla":
        return config.q_rank + config.kv_rank
    normed = {"none": 0, "head": 2 * config.num_heads + config.num_kv_heads}
    return config.head_dim * normed.get(config.qk_norm, config.num_heads + config.num_kv_heads)


def deferred_bytes(config: ModelConfig, spec: StageSpec, batch: MicroBatch) -> int:
    """Bytes saved from I to W of a split backward: the inputs and output gradients of the matrix products.

    With fp8, both are in 8 bits, except those of the head.
    """
    blocks = (deferred_attention(config, batch) + deferred_mlp(config, layer, batch) for layer in spec.layers)
    return sum(blocks) + deferred_head(config, spec, batch)


def deferred_head(config: ModelConfig, spec: StageSpec, batch: MicroBatch) -> int:
    return batch.tokens * (config.hidden_size + config.vocab_size) * batch.element * spec.head


def deferred_attention(config: ModelConfig, batch: MicroBatch) -> int:
    """`deferred_bytes` of the attention of a block, with the layer's input and output gradient."""
    return batch.tokens * (attention_costs(config).deferred_width(config) + 2 * config.hidden_size) * batch.operand


def deferred_mlp(config: ModelConfig, layer: int, batch: MicroBatch) -> int:
    """`deferred_bytes` of the MLP or the experts of a block."""
    saved = _deferred_numbers(config, layer, batch) * batch.operand
    if config.is_dense(layer):
        return saved
    indices = 8 * choices_received(config, batch)
    indices += 4 * config.experts_per_token * rows_received(config, batch)
    return saved + indices + batch.tokens * _logits(config, batch)


def _deferred_numbers(config: ModelConfig, layer: int, batch: MicroBatch) -> int:
    tokens, hidden = batch.tokens, config.hidden_size
    if config.is_dense(layer):
        return tokens * (2 * hidden + 3 * config.dense_size)
    rows = rows_received(config, batch) * (batch.ep > 1)
    choices = choices_received(config, batch)
    numbers = 2 * choices * hidden * batch.plain  # sorted inputs and output gradients
    numbers += tokens * (2 * hidden + 3 * config.num_shared_experts * config.expert_size)
    numbers += tokens * (hidden + 1) * config.shared_gate  # gradients before the gate, and of the gate
    # A recomputed router has its own input, not the tensor that the experts get.
    numbers += tokens * hidden * (batch.recompute in ("attention", "full"))
    return numbers + 2 * rows * hidden + 3 * config.expert_size * choices


# ---- What a backward needs only while it runs ----
#
# A backward frees what the forward has saved, from the last block to the first. On the way it allocates gradients of
# activations, and what it recomputes. The peak is at the loss, which needs two tensors as large as the logits; or in
# the MLP or the attention of a block, if what they need is more than what the blocks after it have freed.
#
# The numbers of rows follow from the order of the operators of plain torch. Kernels that fuse operators need less.


def working_bytes(config: ModelConfig, spec: StageSpec, batch: MicroBatch, deferring: bool = False) -> int:
    """How many bytes a backward of a stage needs at its peak, beyond `saved_bytes`.

    deferring: weight gradients are deferred, so that what they need replaces what is freed.
    """
    chunk = min(batch.tokens, 1024) if batch.fused_loss else batch.tokens
    most = 8 * chunk * config.vocab_size * spec.head  # gradients of log-probabilities and of logits, in fp32
    # The gradient of the stage's output exists until the end. That of the logits is also deferred: it counts there.
    width = config.vocab_size if spec.head and not batch.fused_loss else config.hidden_size
    kept = deferring and spec.head and not batch.fused_loss
    output = 0 if kept else batch.tokens * width * batch.element
    freed = saved_bytes(config, spec, batch) - batch.tokens * (config.hidden_size * batch.element + 8 * spec.embedding)
    freed -= sum(block_bytes(config, spec, layer, batch) for layer in spec.layers) + output
    freed -= deferred_head(config, spec, batch) * deferring
    for layer in reversed(spec.layers):
        most = max(most, mlp_working(config, layer, batch) - freed)
        freed += block_bytes(config, spec, layer, batch) - deferred_mlp(config, layer, batch) * deferring
        most = max(most, attention_working(config, layer, batch) - freed)
        freed -= deferred_attention(config, batch) * deferring
    return most


def mlp_working(config: ModelConfig, layer: int, batch: MicroBatch) -> int:
    """Bytes that the backward of an MLP or of experts needs at its peak, beyond what its block has saved."""
    hidden, full = config.hidden_size, batch.recompute == "full"
    k = config.experts_per_token * batch.load  # rows of experts for each token
    again = 1 + batch.plain
    if config.is_dense(layer):
        inner = config.dense_size
        most = max(2 * inner + hidden, 3 * hidden * (batch.recompute in ("norms", "attention")))
        most += full * (4 * inner + again * hidden)
        largest = 2 * inner * hidden
    else:
        inner, shared = config.expert_size, config.num_shared_experts * config.expert_size
        most = max((2 * k + 1) * hidden, 2 * k * inner - hidden)
        most += full * (k * (again * hidden + 4 * inner) + hidden * (shared > 0)) - 4 * shared * (not full)
        most = max(most, 2 * shared + hidden + 4 * shared * full)
        largest = 2 * inner * hidden * config.num_experts // batch.ep
    operands = 4 * largest * batch.plain  # kernels add to gradients in place
    if batch.plain and batch.fp8_block and not config.is_dense(layer):
        most = max(most, k * (hidden + 8 * inner))
        operands = 3 * operands + round(8 * batch.tokens * k * inner)  # weights and rows are read back into fp32
    return max(round(batch.tokens * most) * batch.element, operands)


def attention_working(config: ModelConfig, layer: int, batch: MicroBatch) -> int:
    """Bytes that a block needs at the peak of its attention's backward, after its MLP has been freed."""
    heads = config.num_heads
    if config.attention == "mla":
        gradients = heads * (2 * (config.head_dim + config.rope_dim) + config.value_dim)
    else:
        gradients = 2 * (heads + config.num_kv_heads) * config.head_dim
    rows = (6 - config.is_dense(layer)) * config.hidden_size
    saved = attention_costs(config).saved_bytes(config, batch.tokens, batch.element)
    return saved + batch.tokens * (rows + gradients) * batch.element
