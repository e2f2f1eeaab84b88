"""Bytes that a micro-batch keeps on a stage: between its forward and its backward, and between I and W of a split one.

Activations are most of what training holds, and depend on the model, on what is recomputed and on how the experts are
spread. This adds up the tensors that the layers keep, by formula, so that it costs nothing for a model of any size;
tests/gpu/test_memory.py holds it against the tensors that are really there.

Assumed is what runs on a GPU: fused experts (x and z are kept), fused RMSNorm (its input, one number a row), flash
attention (q, k, v, their result, one number a row and head). The plain operators keep more. Chosen experts are taken to
be equally loaded and independent of each other, which says how many rows arrive. Tables of a few bytes an expert are
left out.

T tokens, D model dim, K experts per token, N rows received, M = T K rows in expert-major order, F inner width.
"""

import math
from dataclasses import dataclass

from ..models.attention import ATTENTION
from ..models.config import ModelConfig
from ..models.partition import StageSpec
from ..models.recompute import Recompute


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of a rank; `element`: bytes of an activation, `ep`: ranks that the experts are spread over."""

    sequences: int
    seq_len: int
    element: int = 2
    ep: int = 1
    recompute: Recompute = "none"
    fused_loss: bool = False

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len


def rows_received(config: ModelConfig, batch: MicroBatch) -> int:
    """N: a token goes once to each rank that has any of its experts, and as many come as go.

    Example: 2 of 4 experts on 2 ranks: both are on one rank in 2 of 6 cases, so 100 tokens make 167 rows.
    """
    experts, k = config.num_experts, config.experts_per_token
    missed = math.comb(experts - experts // batch.ep, k) / math.comb(experts, k)
    return round(batch.tokens * batch.ep * (1 - missed))


def kept_for_backward(config: ModelConfig, spec: StageSpec, batch: MicroBatch) -> int:
    """Bytes from the forward of a micro-batch on a stage until its backward, input and output included.

    Raises ValueError for a stage that predicts further ahead, whose criterion is not reckoned with.
    """
    if spec.mtp:
        raise ValueError(f"memory is not reckoned with mtp_layers: got {len(spec.mtp)}; use 0")
    row = batch.tokens * config.hidden_size * batch.element
    kept = row + 8 * batch.tokens * spec.embedding
    kept += sum(_block(config, spec, layer, batch) for layer in spec.layers)
    if not spec.head:
        return kept + row
    kept += 2 * row + 4 * batch.tokens  # the sum of the parts, normalised
    per_token = 4 if batch.fused_loss else 4 * config.vocab_size  # the logarithms of probabilities, or of their sum
    return kept + batch.tokens * (per_token + 8)


def _block(config: ModelConfig, spec: StageSpec, layer: int, batch: MicroBatch) -> int:
    tokens, row = batch.tokens, batch.tokens * config.hidden_size * batch.element
    first, last, dense = layer == spec.layers[0], layer == spec.layers[-1], config.is_dense(layer)
    shared = not dense and config.num_shared_experts > 0
    again = batch.recompute in ("attention", "full")
    # An attention that runs again keeps the parts of its input; otherwise it is their sum that is kept.
    kept = row * (1 + shared) * (not last) if again else row * (not first)
    if not again or not last or dense or (shared and batch.recompute == "attention"):
        kept += row  # the stream between attention and MLP
    if not again:
        kept += ATTENTION[config.attention].saved_bytes(config, tokens, batch.seq_len, batch.element)
    if batch.recompute == "none":
        kept += 2 * (row + 4 * tokens)  # normalised, twice
    if dense:
        return kept + (0 if batch.recompute == "full" else _swiglu(config.dense_size, batch))
    if not again:
        kept += tokens * (config.num_experts * batch.element + 8 * config.experts_per_token)  # logits and choices
    if batch.recompute == "full" and shared:
        kept += row  # what the shared experts start from
    if batch.recompute != "full":
        kept += _swiglu(config.num_shared_experts * config.expert_size, batch)
    return kept + _experts(config, batch, copied=batch.recompute == "none" or (batch.recompute == "full" and shared))


def _swiglu(inner: int, batch: MicroBatch) -> int:
    """Gate and up, silu(gate), and the product of it with up: not the fused one."""
    return 4 * inner * batch.tokens * batch.element


def _experts(config: ModelConfig, batch: MicroBatch, copied: bool) -> int:
    """Rows that came, z of the experts, and indices. copied: the rows are kept anyhow where none of them travelled."""
    tokens, k, rows = batch.tokens, config.experts_per_token, rows_received(config, batch)
    choices = tokens * k
    kept = 16 * choices + 8 * rows * k  # the expert-major order
    if batch.ep == 1:
        kept += 8 * choices + 4 * choices  # ids and weights
        kept += 0 if copied else tokens * config.hidden_size * batch.element
    else:
        kept += rows * (_aligned(config.hidden_size * batch.element) + 2 * _aligned(4 * k) + 4 * k + 4 * k)
        kept += 8 * tokens * (min(k, batch.ep) + k)  # where rows go, and where they come back to
        kept += 0 if batch.recompute == "full" else 4 * rows * k  # weights, out of the message
    return kept + (0 if batch.recompute == "full" else 2 * config.expert_size * choices * batch.element)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def kept_for_weights(config: ModelConfig, spec: StageSpec, batch: MicroBatch) -> int:
    """Bytes from the input half of a split backward until its weight half: inputs and output gradients of products."""
    numbers = sum(_products(config, layer, batch) for layer in spec.layers)
    if spec.head:
        numbers += batch.tokens * (config.hidden_size + config.vocab_size)
    indices = 16 * batch.tokens * config.experts_per_token + 8 * rows_received(config, batch) * config.experts_per_token
    return numbers * batch.element + indices * sum(not config.is_dense(layer) for layer in spec.layers)


def _products(config: ModelConfig, layer: int, batch: MicroBatch) -> int:
    """Numbers, not bytes."""
    tokens, hidden = batch.tokens, config.hidden_size
    width = ATTENTION[config.attention].deferred_width(config)
    numbers = tokens * (width + 2 * hidden)  # the input, and the gradient of the result
    if config.is_dense(layer):
        return numbers + tokens * (2 * hidden + 3 * config.dense_size)
    rows = rows_received(config, batch) * (batch.ep > 1)
    numbers += tokens * (2 * hidden + 3 * config.num_shared_experts * config.expert_size + config.num_experts)
    # Where the router runs again, its input is not that of the experts.
    numbers += tokens * hidden * (batch.recompute in ("attention", "full"))
    return numbers + 2 * rows * hidden + 3 * config.expert_size * tokens * config.experts_per_token
