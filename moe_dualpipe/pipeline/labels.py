"""What the labels of a step say: the weight of each micro-batch's loss, and which positions are padding.

A label of -100 is ignored. What follows the last label of a sequence is padding, or where the documents of a batch are
known, positions without one. Padding cannot change the loss, so it must not change anything else: no router loss,
expert load or bias. Other positions without a label do count.

Means are over all labeled tokens of all ranks, or over all documents, however the batch is divided. So the ranks add up
their counts. Without numbers of documents, a sequence with a label is one.

R sequences of a step on this rank, S positions. Depth 0 is the main loss, depth k >= 1 that of MTP module k, whose
labels begin at position k.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..expert_parallel.gather import sum_over_ranks
from ..messages import plural
from ..models.context_parallel import Context
from ..runtime.layout import Layout

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


class Batch(NamedTuple):
    """Sequences of a step, each tensor [R, S] of integers.

    labels: the next tokens, -100 for those to ignore. documents: the number of the document of each position, from 0
    to S - 1, or -1 for padding; None: a sequence is one document, up to its last label.
    """

    inputs: Tensor
    labels: Tensor
    documents: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are not None, by name."""
        return {name: tensor for name, tensor in zip(self._fields, self, strict=True) if tensor is not None}

    def rows(self, first: int, stop: int) -> "Batch":
        """The sequences from `first` to `stop`."""
        return Batch(*(tensor[first:stop] for tensor in self.tensors.values()))

    def split(self, size: int) -> list["Batch"]:
        """The micro-batches of `size` sequences."""
        return [self.rows(first, first + size) for first in range(0, len(self.inputs), size)]

    def checked(self) -> "Batch":
        """This batch with documents as int32, without labels for padding. Raises ValueError for invalid documents."""
        if self.documents is None:
            return self
        most, wrong = self.documents.shape[1] - 1, (self.documents < -1) | (self.documents >= self.documents.shape[1])
        if not self.documents.is_cuda and wrong.any():  # of a GPU, the host would wait for the result
            got = self.documents[wrong][0].item()
            raise ValueError(f"documents must be numbers from 0 to {most}, or -1 for padding: got {got}")
        return Batch(self.inputs, self.labels.masked_fill(self.documents < 0, -100), self.documents.int())


@dataclass(frozen=True, slots=True)
class StepLabels:
    """micro_batches: for each micro-batch, its number of labels divided by the mean over all micro-batches, by depth.
    positions: the weights [R, S - depth] of `RouterLayer.weights_BS`, by depth, or [R, s] of the s positions of this
    rank; None if none has padding, and no router needs them.
    """

    micro_batches: list[list[float]]
    positions: list[Tensor] | None = None


def step_labels(
    batch: Batch, micro_batch: int, layout: Layout, depths: int, num_labels: float | None = None,
    context: Context | None = None, routers: bool = False,
) -> StepLabels:  # fmt: skip
    """What the labels and documents of `batch`, of whole sequences, say. context: this rank runs only its positions.

    micro_batch: its number of sequences. num_labels: the number of labels of depth 0 on all data-parallel ranks; None:
    count them. routers: whether routers need the positions of documents, also without padding. Collective, unless all
    positions are labels by `num_labels`, the batch has no documents, and no depths are asked for in a context. Raises
    ValueError, on all ranks, if the batch has no label.
    """
    labels_RS, documents_RS = batch.labels, batch.documents
    sequences, length = labels_RS.shape
    count, cut = sequences // micro_batch, context.cut if context else lambda x, _: x
    by_position = bool(depths and context) if documents_RS is None else bool(depths or routers)
    if num_labels == labels_RS.numel() * layout.dp and documents_RS is None and not by_position:
        return StepLabels([[1.0] * (1 + depths)] * count)
    if documents_RS is None:
        positions_S, numbers_RS = torch.arange(length, device=labels_RS.device), torch.zeros_like(labels_RS)
        ends_R = ((labels_RS >= 0) * (positions_S + 1)).amax(1)  # after the last label
        real_RS = positions_S < ends_R[:, None]
    else:
        numbers_RS, real_RS = documents_RS.clamp(min=0).long(), documents_RS >= 0

    def ahead(x_RS: Tensor) -> Tensor:
        """For each depth k and position, the value k positions later; 0 if there is none. [K, R, S]."""
        return torch.stack([F.pad(x_RS[:, k:], (0, k)) for k in range(1 + depths)])

    real_KRS = ahead(real_RS) & (ahead(numbers_RS) == numbers_RS) & real_RS  # the target is in the same document
    counts_KM = cut(ahead(labels_RS >= 0) & real_KRS, 2).sum(2).unflatten(1, (count, -1)).sum(2)
    numbers_KRS = numbers_RS.expand_as(real_KRS)
    sizes_KRN = torch.zeros_like(real_KRS, dtype=torch.float64).scatter_add_(2, numbers_KRS, real_KRS.double())
    padding = (~real_RS).sum()[None] + by_position
    totals = torch.cat([counts_KM.sum(1), (sizes_KRN > 0).sum((1, 2)), padding]).double().cpu()
    labels_K = (sum_over_ranks(totals)[: 1 + depths] / layout.pp).tolist()
    if num_labels is not None:
        labels_K[0] = num_labels
    if not labels_K[0]:
        raise ValueError("this batch has no label: all of them are -100, so there is no loss")
    scales_K = [count * layout.replicas / max(total, 1) for total in labels_K]
    weights = [[n * scale for n, scale in zip(counts, scales_K, strict=True)] for counts in counts_KM.T.tolist()]
    if not totals[-1]:
        return StepLabels(weights)
    documents_K = (totals[1 + depths : -1] / (layout.pp * layout.cp)).clamp(min=1).to(labels_RS.device)
    each_KRN = sequences * layout.replicas / documents_K[:, None, None] / sizes_KRN.clamp(min=1)
    weights_KRS = cut(real_KRS * each_KRN.gather(2, numbers_KRS), 2)
    # The ranks of a context cannot leave out the last k positions of depth k, so these count as padding.
    return StepLabels(weights, [w_RS if context else w_RS[:, : length - k] for k, w_RS in enumerate(weights_KRS)])


def checksum_terms(*tensors: Tensor) -> Tensor:
    """A checksum of 20 bits, and its square, [2]. Their sums over ranks tell whether all are equal (`all_equal`)."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.cpu().contiguous().numpy().data, value)
    value %= 1 << 20
    return torch.tensor([value, value**2], dtype=torch.float64)


def all_equal(sums: Sequence[float], ranks: int) -> bool:
    """Whether the checksums of `ranks` ranks are equal, from the sums of their `checksum_terms`: their variance is 0.

    The integers are exact for up to 8,192 ranks.
    """
    total, squares = map(int, sums)
    return total**2 == squares * ranks


def token_ids(name: str, tensor: object) -> Tensor:
    """`tensor` as int64. Raises ValueError that starts with `name` unless it is a dense tensor of integers."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor of token ids: got {type(tensor).__name__}; use torch.as_tensor()")
    if tensor.dtype not in INTEGERS:
        raise ValueError(f"{name} must be token ids, integers: got {tensor.dtype}")
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "a meta tensor, without values" if tensor.is_meta else f"the layout {tensor.layout}: use to_dense()"
        raise ValueError(f"{name} must be a dense tensor of token ids: got {kind}")
    return tensor.to(torch.int64)


def check_shape(name: str, tensor: Tensor, micro_batches: int, micro_batch: tuple[int, int]) -> None:
    """Raise ValueError unless `tensor` has the sequences of `micro_batches` micro-batches."""
    expected = [micro_batches * micro_batch[0], micro_batch[1]]
    if [*tensor.shape] != expected:
        parts = plural(micro_batches, "micro-batch", "es")
        raise ValueError(f"{name} must be {expected}, {parts} of {[*micro_batch]}: got {[*tensor.shape]}")
