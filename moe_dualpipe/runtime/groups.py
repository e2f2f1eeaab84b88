"""Which rank plays which part: pipeline, data and expert parallelism, and the process groups for each.

With pp pipeline ranks, the world is pp x dp; rank = pipeline rank x dp + data rank, so the ranks that exchange experts'
tokens, neighbours in `dp`, are neighbours in the world, too. Experts are spread over ep consecutive data ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ..schedule import Placement


@dataclass(frozen=True)
class Layout:
    """Parallel degrees and the place of one rank among them."""

    pp: int
    dp: int
    ep: int
    rank: int

    @property
    def pp_rank(self) -> int:
        return self.rank // self.dp

    @property
    def dp_rank(self) -> int:
        return self.rank % self.dp

    def world_rank(self, pp_rank: int, dp_rank: int) -> int:
        return pp_rank * self.dp + dp_rank


@dataclass(frozen=True)
class Groups:
    """The process groups that this rank belongs to; None where it would be alone.

    pipeline: this data rank's pipeline. experts: the ranks that exchange tokens with this one. dense, expert_replicas:
    the ranks that hold copies of this rank's dense parameters, and of its experts; DualPipe's mirrored ranks included.
    embedding: those that hold it, where the last stage does, too.
    """

    pipeline: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None
    dense: dist.ProcessGroup | None = None
    expert_replicas: dist.ProcessGroup | None = None
    embedding: dist.ProcessGroup | None = None


def build_groups(
    layout: Layout, placement: Placement, timeout: timedelta | None = None, shared_embedding: bool = False
) -> Groups:
    """Create all process groups. Collective: every rank creates every group, in the same order.

    timeout: how long their operations wait; a group does not take it from the world's. None: torch's own.
    shared_embedding: the last stage holds the embedding as well (models/mtp.py).
    """
    pps, dps, eps = range(layout.pp), range(layout.dp), range(layout.ep)
    # Stages that share their holders share a group: rank r holds replicas with the ranks that hold what it holds.
    peers = sorted({tuple(sorted({r for s in stages for r in placement.holders(s)})) for stages in placement.stages})
    pipeline = _group([[layout.world_rank(p, d) for p in pps] for d in dps], layout.rank, timeout)
    experts = _group(
        [[layout.world_rank(p, d + e) for e in eps] for p in pps for d in range(0, layout.dp, layout.ep)],
        layout.rank,
        timeout,
    )
    dense = _group([[layout.world_rank(p, d) for p in held for d in dps] for held in peers], layout.rank, timeout)
    expert_replicas = _group(
        [[layout.world_rank(p, d) for p in held for d in dps if d % layout.ep == e] for held in peers for e in eps],
        layout.rank,
        timeout,
    )
    ends = sorted({*placement.holders(0), *placement.holders(placement.num_stages - 1)}) if shared_embedding else []
    embedding = _group([[layout.world_rank(p, d) for p in ends for d in dps]], layout.rank, timeout)
    return Groups(pipeline, experts, dense, expert_replicas, embedding)


def _group(memberships: Iterable[list[int]], rank: int, timeout: timedelta | None) -> dist.ProcessGroup | None:
    """Create a group for each list of more than one rank; return the one that `rank` belongs to."""
    mine = None
    for members in memberships:
        if len(members) > 1:
            group = dist.new_group(members, timeout=timeout)
            if rank in members:
                assert isinstance(group, dist.ProcessGroup)
                mine = group
    return mine
