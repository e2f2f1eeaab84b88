"""The model as pipeline stages: the embedding in the first, the head in the last, blocks divided by partition.py.

The last stage returns logits. With `fused_loss` or `mtp_layers` it returns normalized hidden states [B, S, D] instead,
and the criterion applies the head: a chunk at a time (kernels/cross_entropy.py), or for multi-token prediction as well
(mtp.py). The methods `loss` and `logits` take the output of the last stage in either case.

Parameter names (`layers.3.attention.qkv.weight`) and initial weights do not depend on the split: a stage has the same
names and weights as the whole model.

B sequences, S positions, D model dim, V vocabulary.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_dualpipe.expert_parallel import ExpertParallel, Local
from moe_dualpipe.kernels.cross_entropy import linear_cross_entropy
from moe_dualpipe.kernels.fuse import fuse
from moe_dualpipe.kernels.linear import at_least_fp32, linear
from moe_dualpipe.kernels.weight_grads import WeightGrads
from moe_dualpipe.overlap import Compute, Segmented, Segments, in_layer

from .adapters import add_adapters
from .attention import document_mask
from .auxiliary_losses import attach, weighted
from .block import block_class, block_parts, check_context
from .config import DEFAULT_OPTIONS, LoRA, ModelConfig, StageOptions
from .custom_layers import custom_source
from .kv_cache import KVCache
from .layers import Linear, seeded
from .mtp import MTP, MTPBatch
from .partition import StageSpec, split
from .recompute import add_and_normalize, add_up


class TransformerStage(Segmented):
    """One stage. The first maps token ids [B, S] to hidden states [B, S, D], the last returns logits [B, S, V].

    With a `cache` (kv_cache.py), x follows the cached positions and is added to the cache; only without gradients.

    documents_BS: the number of the document of each position: positions attend only within their document. Each stage
    but the last then also returns them, as the second argument of the next stage. None: attend to all positions before.
    With `options.context`, x has the positions of this rank, and the document numbers those of all.
    rows_B: the numbers of the sequences in the step, for `MoE.route`.
    """

    companions: Mapping[str, str] = {}
    """The texts of the files that came with the weights of a published model, by file name."""

    def __init__(
        self, config: ModelConfig, spec: StageSpec, expert_parallel: ExpertParallel | None = None,
        options: StageOptions = DEFAULT_OPTIONS,
    ):  # fmt: skip
        super().__init__()
        self.config, self.spec, self.options = config, spec, options
        self.head_in_loss = options.fused_loss or bool(spec.mtp)
        expert_parallel = expert_parallel or Local(config.num_experts, options.kernels)
        if spec.embedding or (spec.head and config.last_stage_embeds):
            with seeded(options.seed, "embedding"):
                self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
                nn.init.normal_(self.embedding.weight, std=config.init_std)
        self.layers, block = nn.ModuleDict(), block_class(config)
        for layer in spec.layers:
            with seeded(options.seed, f"layers.{layer}"):
                self.layers[str(layer)] = block.build(config, layer, expert_parallel, options)
                check_context(self.layers[str(layer)], options.context)
        if spec.head:
            self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
            with seeded(options.seed, "head"):
                self.head = (
                    TiedHead(self.embedding) if config.tied_embeddings
                    else Linear(config.hidden_size, config.vocab_size, config.init_std)
                )  # fmt: skip
        self.elementwise = ("embedding.weight", "head.weight")
        self.mtp = MTP(config, expert_parallel, options) if spec.mtp else None
        if options.lora is not None:
            self.add_adapters(options.lora)
        for module in self.modules():
            if hasattr(module, "compiled"):
                setattr(module, "compiled", options.compiled)  # noqa: B010 - nn.Module declares no such attribute

    def add_adapters(self, lora: LoRA) -> None:
        """Freeze the weights, and train low-rank adapters beside them (lora.py). Raises ValueError for a target that
        the model cannot have."""
        self.requires_grad_(False)
        add_adapters(self.config, dict(self.layers.items()), lora, self.options.seed)

    def use_embedding(self, embedding: nn.Embedding) -> None:
        """Replace the embedding, and the weight of a tied head, by that of another stage."""
        self.embedding = embedding
        if isinstance(getattr(self, "head", None), TiedHead):
            self.head = TiedHead(embedding)

    def segments(
        self, x: Tensor, documents_BS: Tensor | None = None, cache: KVCache | None = None, rows_B: Tensor | None = None
    ) -> Segments:
        mask_B1SS = None if documents_BS is None else document_mask(documents_BS, self.options.context)
        parts = (x,)
        if self.spec.embedding:
            parts = ((yield Compute("embed", self.embedding, x)),)
        for layer, block in zip(self.spec.layers, self.layers.values(), strict=True):
            parts = yield from in_layer(
                layer, block_parts(block, layer, parts, cache, mask_B1SS, rows_B), custom_source(block)
            )
        output = yield Compute("head", self.finish, *parts) if self.spec.head else Compute("add", add_up, *parts)
        if cache is not None:
            cache.length += x.shape[1]
        return output if documents_BS is None or self.spec.head else (output, documents_BS)

    def finish(self, *parts: Tensor) -> Tensor:
        _, x_BSD = fuse(add_and_normalize, self.options.compiled)(self.norm, *parts)
        return x_BSD if self.head_in_loss else self.head(x_BSD)

    def logits(self, output: Tensor) -> Tensor:
        """The logits [..., V] of the output of the last stage, or of some of its positions.

        Raises ValueError for a stage without the head.
        """
        self._check_head()
        return self.head(output) if self.head_in_loss else output

    def loss(
        self, output: Tensor, labels_BS: Tensor, weight: float | Tensor = 1.0, mtp: MTPBatch | None = None
    ) -> Tensor:
        """The criterion of the last stage: mean cross-entropy of its output in nats per token, in fp32 at least.

        weight: a factor on it, 0 without labels; auxiliary losses keep their factors. With `mtp_layers` the gradients
        include those of the MTP loss; the value does not include it. mtp: what its modules need if labels are ignored.
        Raises ValueError for a stage without the head.
        """
        self._check_head()
        loss = self.cross_entropy(output, labels_BS) if self.head_in_loss else self._next_token_loss(output, labels_BS)
        loss = weighted(loss, weight)
        if self.mtp is not None and torch.is_grad_enabled():
            loss = attach(loss, self.mtp(output, labels_BS, self.embedding, self.cross_entropy, mtp))
        return loss

    def cross_entropy(self, x_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        """The mean loss of the head applied to normalized hidden states."""
        if not self.options.fused_loss:
            return self._next_token_loss(self.head(x_BSD), labels_BS)
        x_TD, labels_T = x_BSD.flatten(0, 1), labels_BS.flatten()
        return linear_cross_entropy(x_TD, self.head.weight, labels_T, weight_grads=self.head.weight_grads)

    def _next_token_loss(self, logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        # On a CPU, the compiled loss takes twice the time of torch's own operators.
        return fuse(next_token_loss, self.options.compiled and logits_BSV.is_cuda)(logits_BSV, labels_BS)

    def _check_head(self) -> None:
        if not self.spec.head:
            raise ValueError(f"only the last stage, which holds the head, has logits and a loss: this has {self.spec}")


class TiedHead(nn.Module):
    """The head with the weight of an embedding, which is not a parameter of the head, so it has one name only."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self._embedding = [embedding]  # in a list, so that it does not become a submodule
        self.weight_grads: WeightGrads | None = None

    @property
    def weight(self) -> Tensor:
        return self._embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.weight_grads)


def share_embedding(stages: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Make the first and the last stage share one embedding parameter, if this rank holds both.

    Returns the rank's embedding parameter in a list, which is empty without one. With a tied head or MTP, the last
    stage needs the embedding, too. On two ranks the embeddings are replicas, and their gradients are summed
    (runtime/replicas.py).
    """
    holders = [stage for stage in stages if isinstance(stage, TransformerStage) and hasattr(stage, "embedding")]
    for other in holders[1:]:
        other.use_embedding(holders[0].embedding)
    return [parameter for stage in holders[:1] for parameter in stage.embedding.parameters()]


def build_model(
    config: ModelConfig, expert_parallel: ExpertParallel | None = None, options: StageOptions = DEFAULT_OPTIONS
) -> TransformerStage:
    """The whole model as a single stage."""
    return TransformerStage(config, split(config, 1)[0], expert_parallel, options)


def next_token_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token, in fp32 at least."""
    return F.cross_entropy(at_least_fp32(logits_BSV).flatten(0, 1), labels_BS.flatten())
