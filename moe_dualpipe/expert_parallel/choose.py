"""Choose the backend that sends tokens to the ranks of their experts.

    symmetric    GPUs of one machine that can read and write each other's memory
    shared       CPU ranks of one machine
    all_to_all   everything else: torch.distributed
    copy_engine  only on request: as symmetric, for up to 16 ranks with few tokens
    deepep       only on request: GPUs, if the package deep_ep is installed

The ranks of a group exchange what they know of their machines and decide by the same facts, so they agree. Backends
that write into the memory of other GPUs are tried first (trial.py). A module that not everyone has is imported only if
it may be chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..kernels.backend import Kernels
from .all_to_all import AllToAll
from .gather import gather_objects
from .local import Local
from .options import MAX_COPIED, EpBackend
from .protocol import ExpertParallel
from .shared import Shared, find_machine
from .trial import try_backend


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank knows. machine: equal for ranks of one machine. gpu: an id of this rank's GPU; "" on CPUs.

    peers: the GPUs whose memory this rank's GPU can access. missing: why a backend cannot be imported, by its name.
    """

    device_type: str
    machine: str
    gpu: str = ""
    peers: frozenset[str] = frozenset()
    missing: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen backend, its name and the reason."""

    backend: ExpertParallel
    name: str
    reason: str

    @property
    def in_background(self) -> bool:
        """Whether transfers go on while this process computes, so that overlap can hide them.

        The copies of Shared run on the same core: on two cores, steps without overlap were 3% faster.
        """
        return self.name not in ("none", "shared")

    def check(self) -> None:
        """Raise the error of a transfer that failed on a GPU. Call it after its results have been read."""
        if self.name in ("symmetric", "copy_engine"):
            self.backend.check()  # type: ignore[attr-defined]

    def take_remote_bytes(self) -> int:
        """Bytes of rows that this rank has sent to other machines since the last call. Counted by all_to_all."""
        if not isinstance(self.backend, AllToAll):
            return 0
        taken, self.backend.remote_bytes = self.backend.remote_bytes, 0
        return taken

    def __str__(self) -> str:
        return f"dispatch and combine: {self.name} ({self.reason})"


def choose_backend(
    name: EpBackend, num_experts: int, group: dist.ProcessGroup | None, device: torch.device, *,
    kernels: Kernels = "auto", max_tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype = torch.float32,
    timeout: float | None = None,
) -> Choice:  # fmt: skip
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
        return Choice(Local(num_experts, kernels), "none", "each rank has all experts")
    tried = {"auto": ["symmetric"] * (device.type == "cuda")}.get(name, [name])
    mine = find_facts(device, tried)
    facts = gather_objects(mine, group)
    chosen, reason = decide(name, facts)
    seconds = default_pg_timeout.total_seconds() if timeout is None else timeout
    sizes: dict[str, Any] = {"max_tokens": max_tokens, "hidden_size": hidden_size, "top_k": top_k}
    remote = [rank for rank, one in enumerate(facts) if one.machine != mine.machine]
    all_to_all = AllToAll(num_experts, group, kernels, remote)
    match chosen:
        case "shared":
            return Choice(Shared(num_experts, group, kernels, seconds), chosen, reason)
        case "deepep":
            return Choice(_load("deepep")(num_experts, group, kernels, **sizes), chosen, reason)
        case "symmetric" | "copy_engine":
            sizes["dtype"] = dtype
            build = partial(_load(chosen), num_experts, group, kernels, timeout=seconds, **sizes)
            backend, fault = try_backend(build, all_to_all, group, device, **sizes)
            if backend is None and chosen == "copy_engine":
                reason = f"{reason}, with flags of a kernel: with copied ones, {fault}"
                backend, fault = try_backend(partial(build, flags="kernel"), all_to_all, group, device, **sizes)
            if backend is not None:
                return Choice(backend, chosen, reason)
            if name != "auto":
                raise _refusal(name, fault)
            chosen, reason = "all_to_all", f"symmetric failed its trial: {fault}"
    return Choice(all_to_all, chosen, reason)


def decide(name: str, facts: Sequence[Facts]) -> tuple[str, str]:
    """The backend for ranks with these facts, and the reason. Raises ValueError if `name` cannot be used."""
    faults = {
        "symmetric": _peers_fault("symmetric", facts), "shared": _shared_fault(facts), "deepep": _deepep_fault(facts),
        "copy_engine": _copies_fault(facts) or _peers_fault("copy_engine", facts),
    }  # fmt: skip
    if name == "auto":
        if not faults["symmetric"]:
            return "symmetric", "its GPUs access each other's memory"
        if not faults["shared"]:
            return "shared", "CPU ranks of one machine; copies leave nothing to overlap"
        on_cpu = facts[0].device_type == "cpu"
        return "all_to_all", faults["shared" if on_cpu else "symmetric"]
    if fault := faults.get(name):
        raise _refusal(name, fault)
    return name, "as requested"


def _refusal(name: str, fault: str) -> ValueError:
    way_out = "" if "--ep-backend" in fault else "; use auto or all_to_all"
    return ValueError(f"--ep-backend {name} cannot be used: {fault}{way_out}")


def find_facts(device: torch.device, tried: Sequence[str] = ()) -> Facts:
    """The facts of this rank. tried: the backends to import."""
    missing = []
    for name in tried:
        if name in _CLASSES:
            try:
                _load(name)
            except ValueError as error:
                missing.append((name, str(error)))
    if device.type != "cuda":
        return Facts(device.type, find_machine(), missing=tuple(missing))
    own = torch.cuda.current_device() if device.index is None else device.index
    others = [i for i in range(torch.cuda.device_count()) if i != own and torch.cuda.can_device_access_peer(own, i)]
    return Facts("cuda", find_machine(), _gpu_id(own), frozenset(map(_gpu_id, others)), tuple(missing))


def _gpu_id(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _copies_fault(facts: Sequence[Facts]) -> str:
    if len(facts) <= MAX_COPIED:
        return ""
    return f"its messages are padded, too much for more than {MAX_COPIED} ranks that share experts: got {len(facts)}"


def _peers_fault(name: str, facts: Sequence[Facts]) -> str:
    if any(one.device_type != "cuda" for one in facts):
        return "it needs GPUs"
    if len({one.machine for one in facts}) > 1:
        return "the ranks that share experts are on several machines"
    if any(other.gpu != one.gpu and other.gpu not in one.peers for one in facts for other in facts):
        return "the GPUs cannot access each other's memory"
    return _missing(name, facts)


def _shared_fault(facts: Sequence[Facts]) -> str:
    if any(one.device_type != "cpu" for one in facts):
        return "it is for CPUs"
    return "the ranks that share experts are on several machines" if len({one.machine for one in facts}) > 1 else ""


def _deepep_fault(facts: Sequence[Facts]) -> str:
    return "it needs GPUs" if any(one.device_type != "cuda" for one in facts) else _missing("deepep", facts)


def _missing(name: str, facts: Sequence[Facts]) -> str:
    return next((why for one in facts for missing, why in one.missing if missing == name), "")


_CLASSES = {"symmetric": "Symmetric", "copy_engine": "CopyEngine", "deepep": "DeepEP"}


def _load(name: str) -> Any:
    """The class of a backend. Raises ValueError if it, or the package that it adapts, is not installed."""
    try:
        room = import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(f"the module {error.name} is not installed") from error
    if name == "deepep":
        room.load_library()
    return getattr(room, _CLASSES[name])
