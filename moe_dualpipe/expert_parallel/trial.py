"""Try a backend on a small exchange before a run relies on it.

Kernels that write into the memory of other GPUs depend on drivers, links and versions. No list of requirements covers
all of them.

T tokens, D model dim, K experts per token.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .divided import DividedExperts
from .gather import first_fault

TOKENS = 64
"""The largest number of tokens of a rank in the first part of the trial."""
ROUNDS = 100
"""The number of messages in the second part. Up to 256 are different numbers in bfloat16."""


def try_backend(
    build: Callable[[], DividedExperts], reference: DividedExperts, group: dist.ProcessGroup, device: torch.device, *,
    max_tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype,
) -> tuple[DividedExperts | None, str]:  # fmt: skip
    """Build a backend, compare one forward and backward exchange with `reference`, bit for bit, and look for rows that
    are late. Collective.

    Returns the backend and "", or None and what is wrong with it, the same on all ranks of the group.
    """
    built: list[DividedExperts] = []

    def compare() -> str:
        tokens = min(max_tokens, TOKENS)
        expected, found = (
            _exchange(ep, device, group.rank(), tokens, hidden_size, top_k, dtype) for ep in (reference, *built)
        )
        built[0].check()
        return "" if all(map(torch.equal, found, expected)) else "its results differ from those of all_to_all"

    def look_for_late_rows() -> str:
        return _late_rows(built[0], device, group, max_tokens, hidden_size, dtype)

    for part in (lambda: built.append(build()), compare, look_for_late_rows):
        try:
            fault = part() or ""
        except Exception as error:  # any error of a driver or compiler
            fault = _first_line(error)
        if fault := first_fault(fault, group):  # before the next part: all ranks must do it
            return None, fault
    return built[0], ""


def _exchange(
    ep: DividedExperts, device: torch.device, rank: int, tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype
) -> list[Tensor]:  # fmt: skip
    """Send tokens to their experts and back, twice: as a forward does, and as a backward does."""
    generator = torch.Generator().manual_seed(rank)
    ids_TK = torch.rand(tokens, ep.num_experts, generator=generator).topk(top_k).indices.to(device)
    x_TD = torch.randn(tokens, hidden_size, generator=generator).to(device, dtype)
    weights_TK = torch.rand(tokens, top_k, generator=generator).to(device)
    route = ep.prepare(ids_TK)
    x_ND, weights_NK = ep.dispatch(x_TD, route, weights_TK).wait()
    y_TD, _ = ep.combine(x_ND, route).wait()
    again_ND, _ = ep.dispatch(y_TD, route).wait()
    dx_TD, grads_TK = ep.combine(again_ND, route, weights_NK).wait()
    assert grads_TK is not None
    return [y_TD, dx_TD, grads_TK]


def _late_rows(
    ep: DividedExperts, device: torch.device, group: dist.ProcessGroup, tokens: int, hidden_size: int,
    dtype: torch.dtype,
) -> str:  # fmt: skip
    """A fault if this rank finds rows of an earlier message in a later one, because a flag has overtaken its rows.

    All ranks send all of their tokens to one of them, to each in turn. Each message is full and has its own number.
    """
    wrong = torch.zeros((), dtype=torch.bool, device=device)
    for number in range(ROUNDS):
        target = number % group.size()
        ids_T1 = torch.full((tokens, 1), target * len(ep.local_experts), device=device)
        x_TD = torch.full((tokens, hidden_size), number, dtype=dtype, device=device)
        x_ND = ep.dispatch(x_TD, ep.prepare(ids_T1)).wait().x_ND
        if target == group.rank():
            wrong |= (x_ND[: group.size() * tokens] != number).any()
    return "rows were read before they had arrived" if wrong else ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
