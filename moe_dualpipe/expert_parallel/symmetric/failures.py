"""What a kernel knows about an operation, and what to tell the user about a failure that it has recorded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from ...kernels.gpu.signals import Windows

DISPATCH, COMBINE = 1, 2
_OPERATIONS = "", "dispatch", "combine"


def encode_layout(kind: int, rows: Tensor, weights: Tensor | None, ids: Tensor | None) -> int:
    """A number that is the same on all ranks if they call the same operation. Rows have multiples of 16 bytes.

    The kind has 2 bits, the presence of weights and ids 1 bit each, and their number per row 8 bits.
    """
    choices = next((t.shape[1] for t in (weights, ids) if t is not None), 0)
    row = rows.shape[1] * rows.element_size() // 16
    return kind | (weights is not None) << 2 | (ids is not None) << 3 | (choices & 255) << 4 | row << 12


def describe_failure(
    state: Sequence[int], windows: "Windows", own: Tensor, names: Sequence[int], capacity: int, local_experts: range
) -> RuntimeError:
    """The error for state[:5] of `windows` (kernels/gpu/signals.py).

    own: the memory of this rank. names: the ranks of the group, as ranks of the world.
    """
    from ...kernels.gpu.signals import NOT_FREED, NOT_SENT, OTHER_LAYOUT

    failure, peer, number, layout, found = state
    mine, theirs = names[windows.rank], names[peer]
    kind = _OPERATIONS[layout & 3]
    operation = f"{kind} (operation {number})"
    if failure in (NOT_FREED, NOT_SENT):
        what = f"its {operation}" if failure == NOT_SENT else f"it freed a slot for {operation}"
        return dist.DistError(f"no answer from rank {theirs} for {windows.timeout:g} s before {what}")
    if failure == OTHER_LAYOUT:
        called = _OPERATIONS[found & 3]
        rows = " with other fields or rows of another size" * (called == kind)
        return RuntimeError(
            f"rank {mine} waits for its {operation}, but rank {theirs} called {called}{rows}: all ranks must call the "
            "same operations in the same order"
        )
    rows_R, choices_E = _count(windows, own, number % windows.slots, layout >> 4 & 255, len(local_experts))
    sent = ", ".join(f"{rows} from rank {rank}" for rank, rows in zip(names, rows_R, strict=True) if rows)
    fullest = int(choices_E.argmax())
    return RuntimeError(
        f"rank {mine} was sent {found} rows ({sent}), but its capacity is {capacity}. Expert {local_experts[fullest]} "
        f"was chosen most often: {int(choices_E[fullest])} times. Increase capacity, or balance the load"
    )


def _count(windows: "Windows", own: Tensor, slot: int, top_k: int, num_experts: int) -> tuple[list[int], Tensor]:
    """The rows of each rank in a slot, and how often they choose each local expert."""
    headers, rows = windows.views(own)
    counts = headers[slot, :, 0].tolist()
    ids = [rows[slot, rank, :count, windows.ids_at : windows.ids_at + top_k] for rank, count in enumerate(counts)]
    ids_M = torch.cat([each.flatten() for each in ids])
    return counts, torch.bincount(ids_M[ids_M >= 0], minlength=num_experts)
