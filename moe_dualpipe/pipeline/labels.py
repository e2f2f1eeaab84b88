"""What the labels of a step say: the weight of each micro-batch's loss, and which positions are padding.

A label of -100 is ignored. What follows the last label of a sequence is padding. It cannot change the loss, so it must
not change anything else: no router loss, expert load or bias. Positions before the last label do count.

Means are over all labeled tokens of all ranks, or over all sequences with a label, however the batch is divided. So
the ranks add up their counts.

R sequences of a step on this rank, S positions. Depth 0 is the main loss, depth k >= 1 that of MTP module k, whose
labels begin at position k.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..expert_parallel.gather import sum_over_ranks
from ..messages import plural
from ..models.context_parallel import Context
from ..runtime.layout import Layout

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True, slots=True)
class StepLabels:
    """micro_batches: for each micro-batch, its number of labels divided by the mean over all micro-batches, by depth.
    positions: the weights [R, S - depth] of `RouterLayer.weights_BS`, by depth, or [R, s] of the s positions of this
    rank; None without padding on any rank.
    """

    micro_batches: list[list[float]]
    positions: list[Tensor] | None = None


def step_labels(
    labels_RS: Tensor, ignored_RS: Tensor | None, micro_batch: int, layout: Layout, depths: int,
    num_labels: float | None = None, context: Context | None = None,
) -> StepLabels:  # fmt: skip
    """What `labels_RS`, of whole sequences, say. context: this rank runs only its positions of them.

    ignored_RS: further labels to ignore, but not as padding. micro_batch: its number of sequences.
    num_labels: the number of labels of depth 0 on all data-parallel ranks; None: count them. Raises ValueError, on all
    ranks, if there are none. Not collective if `num_labels` is the number of all positions, unless depths
    are asked for in a context.
    """
    sequences, length = labels_RS.shape
    count, cut = sequences // micro_batch, context.cut if context else lambda x_RS: x_RS
    if num_labels == labels_RS.numel() * layout.dp and not (depths and context):
        return StepLabels([[1.0] * (1 + depths)] * count)
    ends_R = ((labels_RS >= 0) * torch.arange(1, length + 1, device=labels_RS.device)).amax(1)  # after the last label
    lengths_KR = (ends_R - torch.arange(1 + depths, device=labels_RS.device)[:, None]).clamp(min=0)
    counted_RS = (labels_RS if ignored_RS is None else labels_RS.masked_fill(ignored_RS, -100)) >= 0
    counted_KRS = [F.pad(counted_RS[:, k:], (0, k)) for k in range(1 + depths)]
    counts_MK = torch.stack([cut(own_RS).sum(1) for own_RS in counted_KRS], 1).unflatten(0, (count, -1)).sum(1)
    # The ranks of a context cannot leave out the last k positions of depth k, so these count as padding.
    padding = (ends_R < length).sum()[None] + bool(depths and context)
    totals = torch.cat([counts_MK.sum(0), (lengths_KR > 0).sum(1), padding]).double().cpu()
    labels_K = (sum_over_ranks(totals)[: 1 + depths] / layout.pp).tolist()
    if num_labels is not None:
        labels_K[0] = num_labels
    if not labels_K[0]:
        raise ValueError("this batch has no label: all of them are -100, so there is no loss")
    scales_K = [count * layout.replicas / max(total, 1) for total in labels_K]
    weights = [[n * scale for n, scale in zip(counts, scales_K, strict=True)] for counts in counts_MK.tolist()]
    if not totals[-1]:
        return StepLabels(weights)
    positions = []
    for k, lengths_R in enumerate(lengths_KR):
        with_label = totals[1 + depths + k] / (layout.pp * layout.cp)
        each_R = sequences * layout.replicas / max(with_label.item(), 1) / lengths_R.double().clamp(min=1)
        real_RS = torch.arange(length if context else length - k, device=lengths_R.device) < lengths_R[:, None]
        positions.append(cut(real_RS * each_R[:, None]))
    return StepLabels(weights, positions)


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


def token_ids(name: str, tensor: Tensor) -> Tensor:
    """`tensor` as int64. Raises ValueError that starts with `name` unless it is a dense tensor of integers."""
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
