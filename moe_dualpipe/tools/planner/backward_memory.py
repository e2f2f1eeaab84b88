"""Bytes that a rank needs only for a moment, while a stage computes the backward of a micro-batch.

A backward frees what the forward has saved, from the last block to the first. On the way it allocates gradients of
activations, and what it recomputes. The peak is at the loss, which needs two tensors as large as the logits; or in the
MLP or the attention of a block, if what they need is more than what the blocks after it have freed.

The numbers of rows follow from the order of the operators of plain torch. Kernels that fuse operators need less.

T tokens, D model dim, K experts per token, F inner width of an expert, I of a dense MLP or of the shared experts.
"""

from ...models.attention import attention_costs
from ...models.config import ModelConfig
from ...models.partition import StageSpec
from .activations import MicroBatch, block_bytes, deferred_attention, deferred_head, deferred_mlp, saved_bytes


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
    return max(
        round(batch.tokens * most) * batch.element, 4 * largest * batch.plain
    )  # kernels add to gradients in place


def attention_working(config: ModelConfig, layer: int, batch: MicroBatch) -> int:
    """Bytes that a block needs at the peak of the backward of its attention, when its MLP has been freed."""
    heads = config.num_heads
    if config.attention == "mla":
        gradients = heads * (2 * (config.head_dim + config.rope_dim) + config.value_dim)
    else:
        gradients = 2 * (heads + config.num_kv_heads) * config.head_dim
    rows = (6 - config.is_dense(layer)) * config.hidden_size
    saved = attention_costs(config).saved_bytes(config, batch.tokens, batch.element)
    return saved + batch.tokens * (rows + gradients) * batch.element
