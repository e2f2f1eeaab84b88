"""Choose the backend that sends tokens to the ranks of their experts.

    symmetric    GPUs of one machine that can read and write each other's memory
    shared       CPU ranks of one machine
    all_to_all   everything else: torch.distributed
    copy_engine  only on request: as symmetric, for up to 16 ranks with few tokens
    deepep       only on request: GPUs, if the package deep_ep is installed

The ranks of a group exchange what they know of their machines and decide by the same facts, so they agree. Backends
that write into the memory of other GPUs are tried first (trial.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..kernels.backend import Kernels
from .all_to_all import AllToAll
from .copy_engine import CopyEngine
from .deepep import DeepEP, missing_library
from .divided import DividedExperts
from .gather import gather_objects
from .local import Local
from .options import EpBackend
from .rank_facts import RankFacts, all_on, find_facts
from .shared import Shared
from .symmetric import Symmetric
from .trial import try_backend

_BACKENDS: dict[str, type[DividedExperts]] = {
    "all_to_all": AllToAll, "symmetric": Symmetric, "copy_engine": CopyEngine, "shared": Shared, "deepep": DeepEP,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """A backend, its name and the reason why it was chosen."""

    backend: DividedExperts
    name: str
    reason: str

    def __str__(self) -> str:
        return f"dispatch and combine: {self.name} ({self.reason})"


def choose_backend(
    name: EpBackend, num_experts: int, group: dist.ProcessGroup | None, device: torch.device, *,
    kernels: Kernels = "auto", max_tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype = torch.float32,
    timeout: float | None = None,
) -> ChosenBackend:  # fmt: skip
    """Build the backend `name` for the ranks of `group`; None: this rank alone. Collective over the group.

    max_tokens: tokens of a micro-batch. top_k: experts per token. dtype: of the tokens. timeout: seconds that a rank
    waits for another; None: torch's default.
    Raises ValueError, on all ranks of the group, for a backend that cannot be used here.
    """
    if name not in get_args(EpBackend):
        raise ValueError(f"--ep-backend must be one of {', '.join(get_args(EpBackend))}: got {name!r}")
    if group is None:
        if name not in ("auto", "all_to_all"):
            raise ValueError(f"--ep-backend {name} needs --ep 2 or more: with --ep 1, no rank sends tokens")
        return ChosenBackend(Local(num_experts, kernels), "none", "each rank has all experts")
    mine = find_facts(device, missing_library() if name == "deepep" else "")
    facts = gather_objects(mine, group)
    chosen, reason = decide(name, facts)
    seconds = default_pg_timeout.total_seconds() if timeout is None else timeout
    sizes: dict[str, Any] = {"max_tokens": max_tokens, "hidden_size": hidden_size, "top_k": top_k}
    remote = [rank for rank, one in enumerate(facts) if one.machine != mine.machine]
    all_to_all = AllToAll(num_experts, group, kernels, remote)
    match chosen:
        case "shared":
            return ChosenBackend(Shared(num_experts, group, kernels, seconds), chosen, reason)
        case "deepep":
            return ChosenBackend(DeepEP(num_experts, group, kernels, **sizes), chosen, reason)
        case "symmetric" | "copy_engine":
            make: Any = _BACKENDS[chosen]
            build = partial(make, num_experts, group, kernels, timeout=seconds, dtype=dtype, **sizes)
            backend, fault = try_backend(build, all_to_all, group, device, dtype=dtype, **sizes)
            if backend is None and chosen == "copy_engine":
                reason = f"{reason}, with flags of a kernel: with copied ones, {fault}"
                build = partial(build, flags="kernel")
                backend, fault = try_backend(build, all_to_all, group, device, dtype=dtype, **sizes)
            if backend is not None:
                return ChosenBackend(backend, chosen, reason)
            if name != "auto":
                raise _refusal(name, fault)
            chosen, reason = "all_to_all", f"symmetric failed its trial: {fault}"
    return ChosenBackend(all_to_all, chosen, reason)


def decide(name: str, facts: Sequence[RankFacts]) -> tuple[str, str]:
    """The backend for ranks with these facts, and the reason. Raises ValueError if `name` cannot be used."""
    if name != "auto":
        if fault := _BACKENDS[name].fault(facts):
            raise _refusal(name, fault)
        return name, "as requested"
    if not (peers_fault := Symmetric.fault(facts)):
        return "symmetric", "its GPUs access each other's memory"
    if not (shared_fault := Shared.fault(facts)):
        return "shared", "CPU ranks of one machine; copies leave nothing to overlap"
    return "all_to_all", shared_fault if all_on("cpu", facts) else peers_fault


def _refusal(name: str, fault: str) -> ValueError:
    way_out = "" if "--ep-backend" in fault else "; use auto or all_to_all"
    return ValueError(f"--ep-backend {name} cannot be used: {fault}{way_out}")
