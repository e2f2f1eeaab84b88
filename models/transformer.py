"""The model as pipeline stages: embedding in the first, head in the last, blocks divided to balance the work.

The last stage ends in logits, or with `fused_loss` in what the head would make them of: then the loss makes them, a
chunk at a time (kernels/cross_entropy.py). So it does with `mtp_layers`, where the loss also predicts further ahead
(mtp.py). Its methods `loss` and `logits` take what it ends in, whichever that is.

Parameter names are global (`layers.3.attention.qkv.weight`), whichever stage holds the layer, and so are the initial
weights: a stage of a pipeline holds exactly the numbers that the whole model holds at those names.

B sequences, S positions, D model dim, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_dualpipe.expert_parallel import ExpertParallel, Local
from moe_dualpipe.kernels.backend import Kernels, validate_kernels
from moe_dualpipe.kernels.cross_entropy import linear_cross_entropy
from moe_dualpipe.overlap import Compute, Segmented, Segments, in_layer

from .attention import KVCache
from .auxiliary import attach
from .block import Block, add_up
from .config import ModelConfig
from .documents import document_mask, documents
from .layers import Linear, at_least_fp32
from .mtp import MTP
from .recompute import Recompute
from .seeding import seeded


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What one stage holds: a range of blocks, perhaps the embedding, perhaps the head, and its share of the work.

    mtp: the blocks beyond the last layer that predict further ahead; on the last stage only.
    """

    layers: range
    embedding: bool
    head: bool
    share: float
    mtp: range = range(0)

    @property
    def blocks(self) -> list[int]:
        """All blocks, in the order in which the stage holds them."""
        return [*self.layers, *self.mtp]

    def __str__(self) -> str:
        first, last = self.layers[0], self.layers[-1]
        parts = ["embedding"] * self.embedding
        parts += [f"layer {first}" if first == last else f"layers {first}-{last}"]
        parts += ["head"] * self.head
        parts += [f"{len(self.mtp)} further ahead"] * bool(self.mtp)
        return f"{' + '.join(parts)} ({self.share:.0%} of the work)"


def layer_flops(config: ModelConfig, layer: int) -> int:
    """Multiply-adds per token of a block's weights, forward (attention scores, which depend on length, left out)."""
    attention = attention_flops(config)
    if config.is_dense(layer):
        return attention + 3 * config.hidden_size * config.dense_size
    experts = config.experts_per_token + config.num_shared_experts
    return attention + config.hidden_size * (3 * experts * config.expert_size + config.num_experts)


def attention_flops(config: ModelConfig) -> int:
    """The attention's share of `layer_flops`."""
    hidden, heads = config.hidden_size, config.num_heads
    if config.attention == "gqa":
        return 2 * hidden * config.head_dim * (heads + config.num_kv_heads)
    queries = heads * (config.head_dim + config.rope_dim)
    flops = config.q_rank * (hidden + queries) if config.q_rank else hidden * queries
    flops += hidden * (config.kv_rank + config.rope_dim)
    flops += config.kv_rank * heads * (config.head_dim + config.value_dim)
    return flops + heads * config.value_dim * hidden


def ahead_flops(config: ModelConfig, block: int) -> int:
    """The same of what predicts a token further ahead (mtp.py): its projection, its block, and the head once more."""
    return layer_flops(config, block) + config.hidden_size * (2 * config.hidden_size + config.vocab_size)


def split(config: ModelConfig, num_stages: int) -> tuple[StageSpec, ...]:
    """Divide the blocks over `num_stages` consecutive stages so that the slowest stage is as fast as possible.

    Raises ValueError when there are fewer blocks than stages.
    """
    if config.num_layers < num_stages:
        raise ValueError(
            f"{config.num_layers} layers cannot be divided over {num_stages} pipeline stages: "
            f"use at least {num_stages} layers, fewer pipeline ranks, or a schedule with fewer stages (1f1b)"
        )
    costs = [layer_flops(config, layer) for layer in range(config.num_layers)]
    # The head goes wherever the last block goes, and so does what predicts further ahead.
    costs[-1] += config.hidden_size * config.vocab_size + sum(ahead_flops(config, b) for b in config.mtp_blocks)
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(0, 0): (0, ())}  # (stages, layers) -> (max, ends)
    for stages in range(1, num_stages + 1):
        for end in range(stages, config.num_layers + 1):
            best[stages, end] = min(
                (max(best[stages - 1, start][0], sum(costs[start:end])), (*best[stages - 1, start][1], end))
                for start in range(stages - 1, end)
                if (stages - 1, start) in best
            )
    ends = best[num_stages, config.num_layers][1]
    ranges = [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]
    shares = [sum(costs[r.start : r.stop]) / sum(costs) for r in ranges]
    mtp = [range(0)] * (num_stages - 1) + [config.mtp_blocks]
    return tuple(
        StageSpec(r, r.start == 0, r.stop == config.num_layers, share, blocks)
        for r, share, blocks in zip(ranges, shares, mtp, strict=True)
    )


class TransformerStage(Segmented):
    """One stage. The first maps token ids [B, S] to hidden states [B, S, D], the last ends in logits [B, S, V].

    `stage(x, cache)` goes on where the cache (attention.py) ends, and adds x's positions to it; without gradients only.

    With a `separator`, the token that ends a document, positions attend within their document only (documents.py): the
    first stage maps tokens to hidden states and document numbers [B, S], which the next one is called with. A cache is
    one document.

    `recompute` is what each block computes again in its backward instead of keeping it (block.py); `kernels` are
    Triton's or plain torch (kernels/backend.py). With `fused_loss` or `mtp_layers` the last stage ends in normalised
    hidden states [B, S, D] instead; the criterion is its `loss` in either case. Raises ValueError for an unknown
    choice, or kernels that cannot be had.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: StageSpec,
        expert_parallel: ExpertParallel | None = None,
        seed: int = 0,
        recompute: Recompute = "none",
        kernels: Kernels = "auto",
        fused_loss: bool = False,
        separator: int | None = None,
    ):
        super().__init__()
        if separator is not None and config.mtp_layers:
            raise ValueError("what predicts further ahead attends to all documents: use no separator, or mtp_layers 0")
        self.config, self.spec, self.fused_loss, self.separator = config, spec, fused_loss, separator
        self.head_in_loss = fused_loss or bool(spec.mtp)
        kernels = validate_kernels(kernels)
        expert_parallel = expert_parallel if expert_parallel is not None else Local(config.num_experts, kernels)
        if spec.embedding or spec.mtp:
            with seeded(seed, "embedding"):
                self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
                nn.init.normal_(self.embedding.weight, std=config.init_std)
        self.layers = nn.ModuleDict()
        for layer in spec.layers:
            with seeded(seed, f"layers.{layer}"):
                self.layers[str(layer)] = Block(config, layer, expert_parallel, seed, recompute, kernels)
        if spec.head:
            self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
            with seeded(seed, "head"):
                self.head = Linear(config.hidden_size, config.vocab_size, config.init_std)
        self.mtp = MTP(config, expert_parallel, seed, recompute, kernels) if spec.mtp else None

    def segments(self, x: Tensor, context: KVCache | Tensor | None = None) -> Segments:
        cache, documents_BS = (context, None) if isinstance(context, KVCache) else (None, context)
        if self.spec.embedding and self.separator is not None and cache is None:
            documents_BS = documents(x, self.separator)
        mask_B1SS = document_mask(documents_BS) if documents_BS is not None else None
        parts = (x,)
        if self.spec.embedding:
            parts = ((yield Compute("embed", self.embedding, x)),)
        for layer, block in zip(self.spec.layers, self.layers.values(), strict=True):
            parts = yield from in_layer(layer, block.parts(*parts, cache=cache, mask_B1SS=mask_B1SS))  # type: ignore[operator]
        output = yield Compute("head", self.finish, *parts) if self.spec.head else Compute("add", add_up, *parts)
        if cache is not None:
            cache.length += x.shape[1]
        return output if documents_BS is None or self.spec.head else (output, documents_BS)

    def finish(self, *parts: Tensor) -> Tensor:
        x_BSD = self.norm(add_up(*parts))
        return x_BSD if self.head_in_loss else self.head(x_BSD)

    def logits(self, output: Tensor) -> Tensor:
        """What the last stage ended in, all of it or some positions of it, as logits [..., V].

        Raises ValueError for a stage without the head.
        """
        self._check_head()
        return self.head(output) if self.head_in_loss else output

    def loss(self, output: Tensor, labels_BS: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, in fp32 at least, of what the last stage ended in: its criterion.

        With `mtp_layers` its gradients are those of the loss further ahead as well, its value is not (auxiliary.py).
        Raises ValueError for a stage without the head.
        """
        self._check_head()
        loss = self.cross_entropy(output, labels_BS) if self.head_in_loss else next_token_loss(output, labels_BS)
        if self.mtp is not None and torch.is_grad_enabled():
            loss = attach(loss, self.mtp(output, labels_BS, self.embedding, self.cross_entropy))
        return loss

    def cross_entropy(self, x_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        """The mean loss of what the head makes of normalised hidden states."""
        if not self.fused_loss:
            return next_token_loss(self.head(x_BSD), labels_BS)
        x_TD, labels_T = x_BSD.flatten(0, 1), labels_BS.flatten()
        return linear_cross_entropy(x_TD, self.head.weight, labels_T, weight_grads=self.head.weight_grads)

    def _check_head(self) -> None:
        if not self.spec.head:
            raise ValueError(f"only the last stage, which holds the head, has logits and a loss: this has {self.spec}")


def build_model(
    config: ModelConfig,
    expert_parallel: ExpertParallel | None = None,
    seed: int = 0,
    recompute: Recompute = "none",
    kernels: Kernels = "auto",
    fused_loss: bool = False,
    separator: int | None = None,
) -> TransformerStage:
    """The whole model as a single stage."""
    spec = split(config, 1)[0]
    return TransformerStage(config, spec, expert_parallel, seed, recompute, kernels, fused_loss, separator)


def next_token_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token, in fp32 at least."""
    return F.cross_entropy(at_least_fp32(logits_BSV).flatten(0, 1), labels_BS.flatten())
