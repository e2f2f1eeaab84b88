"""Every process group of a run: the world, and the groups for pipeline, data and expert parallelism.

The world has pp x dp x cp ranks. The dp x cp ranks with the same layers are consecutive; each cp of them share their
sequences, and each ep of them the experts. All groups of this package are created here, so that their options are
set in one place.

On GPUs, each group has two backends: NCCL for CUDA tensors, and gloo for CPU tensors. Counts, checks and losses are
sent with gloo, because an NCCL kernel would wait for the queued computation and occupy multiprocessors (SMs).
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..messages import printable
from ..schedule import Placement
from .launch import Launch
from .layout import Layout

_meetings = itertools.count()
MOST_CONNECTED = 64
"""In larger worlds, gloo connects two ranks when they first send to each other. Otherwise it connects all pairs of a
group at once: each of 4,096 ranks would open 4,095 sockets and read the addresses of all ranks."""


def init_world(
    device: torch.device, launch: Launch, timeout: float | None = None, store: dist.Store | None = None
) -> None:
    """Join the other processes; a single process becomes a world of one. Collective.

    timeout: seconds that an operation waits. None: torch's default. store: where they meet. None: where torchrun says.
    """
    if launch.world_size > MOST_CONNECTED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if os.environ.get("LOCAL_WORLD_SIZE") == str(launch.world_size):  # one machine: no other needs to reach these ports
        os.environ |= {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    wait: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
    if store is None:
        store = dist.HashStore() if launch.world_size == 1 else rendezvous(launch, timeout)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, **wait)


def rendezvous(launch: Launch, timeout: float | None) -> dist.Store:
    """The store where the processes of this attempt meet. timeout: seconds that an operation waits.

    A process may meet the others several times in one store. torchrun may use one store for all attempts, too, which
    still has the addresses of dead ranks. If it does not, machines may differ in the number of restarts: one that was
    added has none. Raises ValueError, on one line, if no address is set or nobody answers there.
    """
    wait: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
    try:
        store, _, _ = next(dist.rendezvous("env://", **wait))
    except (RuntimeError, ValueError) as error:
        reason = printable(str(error).partition("\n")[0].removesuffix("."))
        way_out = "check MASTER_ADDR and MASTER_PORT, which torchrun sets, and that all ranks start"
        raise ValueError(f"rank {launch.rank} does not reach the other ranks: {reason}: {way_out}") from None
    attempt = launch.restarts if _agents_share_store() else 0
    return dist.PrefixStore(f"attempt {attempt}, meeting {next(_meetings)}", store)


def decide_for_all(
    store: dist.Store, launch: Launch, name: str, own: object, decide: Callable[[list[Any]], list[Any]]
) -> Any:
    """What the first rank decides for this one, before there is a process group. Collective.

    own: what this rank tells. decide: what holds for each rank, from what all have told. Both are sent as JSON.
    """
    store.set(f"{name}/{launch.rank}", json.dumps(own))
    if launch.rank == 0:
        told = [json.loads(store.get(f"{name}/{rank}")) for rank in range(launch.world_size)]
        for rank, decision in enumerate(decide(told)):
            store.set(f"{name} decided/{rank}", json.dumps(decision))
    return json.loads(store.get(f"{name} decided/{launch.rank}"))


def _agents_share_store() -> bool:
    """Whether the store belongs to torchrun, and not to the process of the first rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def leave_world(timeout: float) -> None:
    """Wait on the first rank until all have come here, for `timeout` seconds: the store may be in its process."""
    leave_store(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), timeout)


def leave_store(store: dist.Store, rank: int, size: int, timeout: float) -> None:
    """`leave_world` for ranks that have met in `store`, but have no process group."""
    if size == 1 or _agents_share_store():
        return
    end = time.monotonic() + timeout
    with suppress(RuntimeError):
        left = store.add("left", 1)
        while rank == 0 and left < size and time.monotonic() < end:
            time.sleep(0.01)
            left = store.add("left", 0)


@dataclass(frozen=True, slots=True)
class Nccl:
    """How NCCL runs the operations of a group.

    high_priority: use a high-priority stream. Otherwise, a transfer waits until all thread blocks of the kernels before
    it have started; a large product has thousands. min_ctas, max_ctas: the smallest and largest number of thread blocks
    of an operation. Each block occupies a multiprocessor (SM). None: NCCL's choice.
    """

    high_priority: bool = False
    min_ctas: int | None = None
    max_ctas: int | None = None

    def options(self) -> Any:
        """The options for torch; None if NCCL does not run the groups of this process."""
        if "nccl" not in str(dist.get_backend_config()):
            return None
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=self.high_priority)
        for name in ("min_ctas", "max_ctas"):
            if (value := getattr(self, name)) is not None:
                setattr(options.config, name, value)
        return options


EXPERTS = Nccl(high_priority=True, max_ctas=20)
"""Dispatch and combine run at the same time as products. 20 SMs are enough for NVLink and InfiniBand (DeepSeek-V3,
section 3.2.2, arXiv 2412.19437). The products use the other SMs (`product_sms`)."""
PIPELINE = Nccl(high_priority=True, min_ctas=2, max_ctas=4)
"""A message between stages is small and has one receiver, but the neighbor waits for it."""
REPLICAS = Nccl()
"""Sums of gradients and gathers of weights run beside the pipeline, at its end and at its start. Nothing waits for them
as soon as for its messages, so their priority is lower. They may use all SMs that are free."""


def product_sms(device: torch.device) -> int | None:
    """The number of SMs that products may use; the others stay free for dispatch and combine. None: all.

    Without this limit, the thread blocks of products occupy all SMs, and a transfer waits until some of them end.
    """
    if device.type != "cuda" or EXPERTS.max_ctas is None:
        return None
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count - EXPERTS.max_ctas)


def create_group(
    ranks: Sequence[int] | None = None, timeout: float | None = None, backend: str | None = None,
    members_only: bool = False, nccl: Nccl = REPLICAS,
) -> dist.ProcessGroup | None:  # fmt: skip
    """Create the group of `ranks` (None: all); returns None on a rank outside it.

    timeout: seconds that an operation waits; a group does not inherit the world's. None: torch's default. nccl: how
    NCCL runs the group's operations on GPUs; on CPUs, and with another `backend`, it has no effect.
    Collective over the world; with `members_only`, over the group's ranks. Then each of them must be in the same number
    of groups so far: torch makes the name of the group from it, and ranks with different names never meet.
    """
    wait = None if timeout is None else timedelta(seconds=timeout)
    options = nccl.options() if backend is None else None
    group = dist.new_group(
        ranks, timeout=wait, backend=backend, pg_options=options, use_local_synchronization=members_only
    )
    return group if isinstance(group, dist.ProcessGroup) else None


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The ranks of `group`, in order. For None, an empty tuple."""
    return () if group is None else tuple(dist.get_process_group_ranks(group))


@dataclass(frozen=True)
class Groups:
    """The process groups of this rank; None where the rank would be the only member.

    pipeline: the pipeline of this data rank. links: two more groups of its ranks, for each direction of its messages
    (runtime/p2p.py); none without NCCL. experts: the ranks that exchange tokens with this one.
    dense, expert_replicas: the ranks that hold copies of this rank's dense parameters, and of its experts; they include
    DualPipe's mirrored ranks. embedding: the ranks that hold the embedding, if the last stage holds it as well.
    context: the ranks that share sequences with this one.
    """

    pipeline: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None
    dense: dist.ProcessGroup | None = None
    expert_replicas: dist.ProcessGroup | None = None
    embedding: dist.ProcessGroup | None = None
    links: tuple[dist.ProcessGroup, ...] = ()
    context: dist.ProcessGroup | None = None


def end_holders(placement: Placement) -> list[int]:
    """The pipeline ranks that hold the first or the last stage, in order."""
    return sorted({*placement.holders(0), *placement.holders(placement.num_stages - 1)})


def build_groups(
    layout: Layout, placement: Placement, timeout: float | None = None, shared_embedding: bool = False
) -> Groups:
    """Create all process groups. Collective: every rank creates every group, in the same order.

    timeout: seconds that an operation waits. shared_embedding: the last stage holds the embedding, too
    (`share_embedding` in models/transformer.py).
    """
    pps, dps, eps = range(layout.pp), range(layout.replicas), range(layout.ep)
    at = layout.world_rank

    def create(memberships: Iterable[list[int]], nccl: Nccl = REPLICAS) -> dist.ProcessGroup | None:
        """Create a group for each list of more than one rank; return the group of this rank."""
        mine = None
        for members in memberships:
            if len(members) > 1:
                group = create_group(members, timeout, nccl=nccl)
                mine = group if layout.rank in members else mine
        return mine

    per_pipeline = 3 if layout.pp > 1 and PIPELINE.options() is not None else 1
    pipeline, *links = (create(([at(p, d) for p in pps] for d in dps), PIPELINE) for _ in range(per_pipeline))
    # Stages with the same holders share a group.
    peers = sorted({tuple(sorted({r for s in stages for r in placement.holders(s)})) for stages in placement.stages})
    ends = end_holders(placement) if shared_embedding else []
    return Groups(
        pipeline=pipeline,
        experts=create(([at(p, d + e) for e in eps] for p in pps for d in dps[:: layout.ep]), EXPERTS),
        dense=create([at(p, d) for p in held for d in dps] for held in peers),
        expert_replicas=create([at(p, d) for p in held for d in dps[e :: layout.ep]] for held in peers for e in eps),
        embedding=create([[at(p, d) for p in ends for d in dps]]),
        links=tuple(link for link in links if link is not None),
        context=create(([at(p, d + c) for c in range(layout.cp)] for p in pps for d in dps[:: layout.cp]), EXPERTS),
    )
