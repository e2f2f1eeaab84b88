"""Try a backend on a small exchange before a run relies on it.

Kernels that write into the memory of other GPUs depend on drivers, links and versions. No list of requirements covers
all of them.

T tokens, D model dim, K experts per token.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .gather import first_fault
from .protocol import ExpertParallel

TOKENS = 64
"""The largest number of tokens of a rank in the trial."""


def try_backend(
    build: Callable[[], ExpertParallel], reference: ExpertParallel, group: dist.ProcessGroup, device: torch.device, *,
    max_tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype,
) -> tuple[ExpertParallel | None, str]:  # fmt: skip
    """Build a backend and compare one forward and backward exchange with `reference`, bit for bit. Collective.

    Returns the backend and "", or None and what is wrong with it, the same on all ranks of the group.
    """
    backend, fault = None, ""
    try:
        backend = build()
    except Exception as error:  # any error of a driver or compiler
        fault = _first_line(error)
    if not (fault := first_fault(fault, group)):
        assert backend is not None
        try:
            tokens = min(max_tokens, TOKENS)
            expected, found = (
                _exchange(ep, device, group.rank(), tokens, hidden_size, top_k, dtype) for ep in (reference, backend)
            )
            getattr(backend, "check", lambda: None)()
            if not all(map(torch.equal, found, expected)):
                fault = "its results differ from those of all_to_all"
        except Exception as error:
            fault = _first_line(error)
        fault = first_fault(fault, group)
    return (None, fault) if fault else (backend, "")


def _exchange(
    ep: ExpertParallel, device: torch.device, rank: int, tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype
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


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
