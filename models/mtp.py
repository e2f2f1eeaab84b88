"""Multi-token prediction (MTP): position i predicts t_{i+1} and also t_{i+2}, t_{i+3} ..., with one module for each.

Each position has more targets, and the modules can draft tokens for speculative decoding, as in DeepSeek-V3 (arXiv
2412.19437, section 2.2). Module k = 1, 2 ... combines the hidden states of the previous module with one more token:

    h^k_i = Block_k(M_k [norm(h^{k-1}_i) ; norm(Emb(t_{i+k}))])        loss_k: norm(h^k_i), head, against t_{i+k+1}

h^0 is the main model's final hidden state, normalized. h^1, h^2 ... are passed on without the norm, as in the paper;
transformers 5.23 passes on norm(h^k). With one module, as in published models, both are the same.

The modules use the main model's embedding and head. They run in the criterion of the last stage, which has the tokens:
t_{i+1} = labels_i. So stages send nothing more. The costs: the overlap engine does not divide the criterion, so the
modules' expert communication is not hidden; and the last stage also holds the embedding.

B sequences, S positions, D model dim.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_dualpipe.expert_parallel import ExpertParallel
from moe_dualpipe.kernels.fuse import fuse
from moe_dualpipe.overlap import Compute, Segmented, Segments, in_layer
from moe_dualpipe.overlap.labels import LOSS

from .attention import document_mask
from .auxiliary_losses import weighted
from .block import block_class, block_parts
from .config import ModelConfig, StageOptions
from .context_parallel import Context
from .custom_layers import custom_source
from .layers import Linear, seeded
from .recompute import add_and_normalize

CrossEntropy = Callable[[Tensor, Tensor], Tensor]
"""(normalized hidden states [B, S, D], labels [B, S]) -> mean loss."""


class MTPBatch(NamedTuple):
    """targets: from `targets`, of the positions of this rank. weights: the weight of the micro-batch in the loss of
    each module. rows_B: see `MoE.route`. documents_BS: as for `TransformerStage`."""

    targets: Sequence[tuple[Tensor, Tensor]]
    weights: Sequence[float]
    rows_B: Tensor | None = None
    documents_BS: Tensor | None = None


def targets(
    modules: int, labels_BS: Tensor, tokens_BS: Tensor | None = None, context: Context | None = None,
    documents_BS: Tensor | None = None,
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """For module k, its input tokens t_{i+k} and labels t_{i+k+1}, for each i that has them, [B, S - k].

    labels_BS, tokens_BS: of whole sequences. tokens_BS: the inputs of the model, whose tokens are embedded where a
    label is ignored. context: return only this rank's positions, [B, s]; the last k of a sequence have labels of -100.
    documents_BS: labels of another document than that of position i are -100. Raises ValueError for short sequences.
    """
    if (length := labels_BS.shape[1]) <= modules:
        raise ValueError(
            f"mtp_layers {modules} needs sequences of at least {modules + 1} tokens: got {length}; "
            "use longer ones, or fewer mtp_layers"
        )
    known_BS = labels_BS
    if tokens_BS is not None:
        next_BS = torch.cat([tokens_BS[:, 1:], labels_BS[:, -1:].clamp(min=0)], dim=1)
        known_BS = torch.where(labels_BS >= 0, labels_BS, next_BS)
    # labels_i is t_{i+1}: position i gets the token t_{i+k} = labels_{i+k-1}, and predicts labels_{i+k}.
    found = [(known_BS[:, k - 1 : -1], labels_BS[:, k:]) for k in range(1, modules + 1)]
    if documents_BS is not None:
        found = [
            (tokens, labels.masked_fill(documents_BS[:, k:] != documents_BS[:, :-k], -100))
            for k, (tokens, labels) in enumerate(found, 1)
        ]
    if context is None:
        return found
    pads = ((0, k) for k in range(1, modules + 1))
    return [
        (context.cut(F.pad(tokens, pad)), context.cut(F.pad(labels, pad, value=-100)))
        for (tokens, labels), pad in zip(found, pads, strict=True)
    ]


class MTPModule(nn.Module):
    """One module: norms, the projection M, and a block with the index `layer`, which follows the model's layers."""

    compiled: bool = False

    def __init__(self, config: ModelConfig, layer: int, expert_parallel: ExpertParallel, options: StageOptions):
        super().__init__()
        self.layer = layer
        width, eps = config.hidden_size, config.norm_eps
        self.hidden_norm, self.token_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        with seeded(options.seed, f"layers.{layer}"):
            self.join = Linear(2 * width, width, config.init_std)
            self.block = block_class(config).build(config, layer, expert_parallel, options)
        self.norm = nn.RMSNorm(width, eps)

    def input(self, embedding: nn.Module, tokens_BS: Tensor, h_BSD: Tensor) -> Tensor:
        """The block's input [B, S, D], from S tokens and the first S hidden states."""
        hidden_BSD = self.hidden_norm(h_BSD[:, : tokens_BS.shape[1]])
        return self.join(torch.cat([hidden_BSD, self.token_norm(embedding(tokens_BS))], dim=-1))

    def output(
        self, cross_entropy: CrossEntropy, labels_BS: Tensor, weight: float, *parts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The hidden states [B, S, D] after the block, and their loss, times `weight`."""
        h_BSD, x_BSD = fuse(add_and_normalize, self.compiled)(self.norm, *parts)
        return h_BSD, weighted(cross_entropy(x_BSD, labels_BS), weight)


class MTP(Segmented):
    """`config.mtp_layers` modules, called "0", "1" ... Returns the term that they add to the loss, a scalar.

    Each use of the head is a separate segment, so its weight gradients are summed in the same order, deferred or not.
    """

    def __init__(self, config: ModelConfig, expert_parallel: ExpertParallel, options: StageOptions):
        super().__init__()
        self.weight, self.count, self.context = config.mtp_weight, 0, options.context
        self.total: Tensor | float = 0.0
        for i, layer in enumerate(config.mtp_blocks):
            self.add_module(str(i), MTPModule(config, layer, expert_parallel, options))

    def segments(
        self, h_BSD: Tensor, labels_BS: Tensor, embedding: nn.Module, cross_entropy: CrossEntropy,
        batch: MTPBatch | None = None,
    ) -> Segments:  # fmt: skip
        """h_BSD: h^0. labels_BS: those of the model, if there is no `batch`."""
        if batch is None:
            batch = MTPBatch(targets(len(self._modules), labels_BS), [1.0] * len(self._modules))
        losses: list[Tensor] = []
        parts_of_k = zip(self.children(), batch.targets, batch.weights, strict=True)
        for module, (tokens_BS, labels_of_k_BS), weight in parts_of_k:
            assert isinstance(module, MTPModule)
            x_BSD = yield Compute("embed", partial(module.input, embedding, tokens_BS), h_BSD)
            mask_B1SS = None
            if batch.documents_BS is not None:
                length = batch.documents_BS.shape[1] if self.context else tokens_BS.shape[1]
                mask_B1SS = document_mask(batch.documents_BS[:, :length], self.context)
            segments = block_parts(module.block, module.layer, (x_BSD,), mask_B1SS=mask_B1SS, rows_B=batch.rows_B)
            parts = yield from in_layer(module.layer, segments, custom_source(module.block))
            output = partial(module.output, cross_entropy, labels_of_k_BS, weight)
            h_BSD, loss = yield Compute("head", output, *parts)
            losses.append(loss)
        return (yield Compute(LOSS, self.weighted, *losses))

    def weighted(self, *losses: Tensor) -> Tensor:
        mean = torch.stack(losses).mean()
        self.total, self.count = self.total + mean.detach(), self.count + 1
        return self.weight * mean

    def take_loss(self) -> Tensor:
        """The mean loss of the micro-batches since the last call, in nats per token, without `mtp_weight`, or nan."""
        mean = torch.as_tensor(self.total / self.count if self.count else torch.nan)
        self.total, self.count = 0.0, 0
        return mean
