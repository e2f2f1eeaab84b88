"""Predicting further ahead: beside the next token t_{i+1}, position i predicts t_{i+2}, t_{i+3} ..., one block each.

A denser training signal, and a draft for speculative decoding, as in DeepSeek-V3 (arXiv 2412.19437, section 2.2).
Module k = 1, 2 ... joins what the one before it knows with the token that it is shown:

    h^k_i = Block_k(M_k [norm(h^{k-1}_i) ; norm(Emb(t_{i+k}))])        loss_k: norm(h^k_i), head, against t_{i+k+1}

h^0 is what the last stage ends in, the main model's normalised hidden state; embedding and head are the main model's.
All of this lives in the last stage's criterion, where the labels are the tokens ahead, t_{i+1} = labels_i: nothing more
has to travel through the pipeline. The price: to the overlap engine the criterion is one piece of computation, so what
these blocks send hides behind nothing; and the last stage holds the embedding, too.

B sequences, S positions, D model dim.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from moe_dualpipe.expert_parallel import ExpertParallel
from moe_dualpipe.kernels.backend import Kernels
from moe_dualpipe.overlap import Compute, Segmented, Segments, in_layer
from moe_dualpipe.overlap.labels import LOSS

from .block import Block, add_up
from .config import ModelConfig
from .layers import Linear
from .recompute import Recompute
from .seeding import seeded

CrossEntropy = Callable[[Tensor, Tensor], Tensor]
"""(normalised hidden states [B, S, D], labels [B, S]) -> mean loss."""


class Ahead(nn.Module):
    """One module: norms, the projection M and a block, which is layer `layer` of the model, beyond the last."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        expert_parallel: ExpertParallel,
        seed: int,
        recompute: Recompute,
        kernels: Kernels,
    ):
        super().__init__()
        self.layer = layer
        width, eps = config.hidden_size, config.norm_eps
        self.hidden_norm, self.token_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        with seeded(seed, f"layers.{layer}"):
            self.join = Linear(2 * width, width, config.init_std)
            self.block = Block(config, layer, expert_parallel, seed, recompute, kernels)
        self.norm = nn.RMSNorm(width, eps)

    def enter(self, embedding: nn.Module, tokens_BS: Tensor, h_BSD: Tensor) -> Tensor:
        """What is known at the first S positions, which are shown one token more each."""
        known_BSD = self.hidden_norm(h_BSD[:, : tokens_BS.shape[1]])
        return self.join(torch.cat([known_BSD, self.token_norm(embedding(tokens_BS))], dim=-1))

    def leave(self, cross_entropy: CrossEntropy, labels_BS: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        h_BSD = add_up(*parts)
        return h_BSD, cross_entropy(self.norm(h_BSD), labels_BS)


class MTP(Segmented):
    """`config.mtp_layers` modules, called "0", "1" ...: the term that they add to the loss, a scalar.

    Each use of the head is in a segment of its own, so its weight's gradients are added up in one order, whether or not
    they are put off.
    """

    def __init__(
        self,
        config: ModelConfig,
        expert_parallel: ExpertParallel,
        seed: int,
        recompute: Recompute,
        kernels: Kernels,
    ):
        super().__init__()
        self.weight, self.total, self.count = config.mtp_weight, torch.zeros(()), 0
        for i, layer in enumerate(config.mtp_blocks):
            self.add_module(str(i), Ahead(config, layer, expert_parallel, seed, recompute, kernels))

    def segments(self, h_BSD: Tensor, labels_BS: Tensor, embedding: nn.Module, cross_entropy: CrossEntropy) -> Segments:
        """From h^0 and the labels, the next tokens. Positions whose token lies beyond the last label do not count."""
        self.check(labels_BS)
        losses: list[Tensor] = []
        for k, module in enumerate(self.children(), start=1):
            assert isinstance(module, Ahead)
            # labels_i is t_{i+1}: position i is shown t_{i+k} = labels_{i+k-1}, and predicts labels_{i+k}.
            shown_BS, labels_of_k_BS = labels_BS[:, k - 1 : -1], labels_BS[:, k:]
            x_BSD = yield Compute("embed", partial(module.enter, embedding, shown_BS), h_BSD)
            parts = yield from in_layer(module.layer, module.block.parts(x_BSD))
            h_BSD, loss = yield Compute("head", partial(module.leave, cross_entropy, labels_of_k_BS), *parts)
            losses.append(loss)
        return (yield Compute(LOSS, self.weigh, *losses))

    def weigh(self, *losses: Tensor) -> Tensor:
        mean = torch.stack(losses).mean()
        self.total, self.count = self.total.to(mean.device) + mean.detach(), self.count + 1
        return self.weight * mean

    def take_loss(self) -> Tensor:
        """The mean loss in nats per token, before it is weighed, of the micro-batches since the last call; nan if none.

        Example: losses of 2.0 and 4.0 -> 3.0.
        """
        mean = self.total / self.count if self.count else self.total.new_tensor(torch.nan)
        self.total, self.count = torch.zeros_like(self.total), 0
        return mean

    def check(self, labels_BS: Tensor) -> None:
        """Raises ValueError for sequences that are too short, and, where that is no host sync, labels of no token."""
        ahead, length = len(self._modules), labels_BS.shape[1]
        if length <= ahead:
            raise ValueError(
                f"mtp_layers {ahead} needs sequences of at least {ahead + 1} tokens: got {length}; "
                "use longer ones, or fewer mtp_layers"
            )
        if labels_BS.device.type == "cpu" and (labels_BS < 0).any():
            raise ValueError(
                f"with mtp_layers every label is shown as a token, too: got {labels_BS.min().item()}; use mtp_layers 0"
            )


def share_embedding(stages: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Make the first and the last stage share one embedding parameter where one rank holds both; returns it.

    With MTP the last stage needs the embedding too. On two different ranks the embeddings are replicas, whose gradients
    are summed (runtime/replicas.py). Returns an empty list on a rank without an embedding.
    """
    holders = [stage for stage in stages if hasattr(stage, "embedding")]
    for other in holders[1:]:
        other.embedding = holders[0].embedding
    return [parameter for stage in holders[:1] for parameter in stage.embedding.parameters()]  # type: ignore[union-attr]
