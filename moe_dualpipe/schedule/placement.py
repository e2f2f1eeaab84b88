"""Which rank holds which stage.

A placement is one or more routes. A route lists the rank of each stage. The micro-batches are divided evenly over the
routes, in order of their ids:

    straight(4)         0 1 2 3               one stage per rank: GPipe, 1F1B, ZB1P
    interleaved(2, 3)   0 1 0 1 0 1           several rounds over the ranks: interleaved 1F1B
    vee(4)              0 1 2 3 3 2 1 0       down and back up: DualPipeV, ZB-V
    mirrored(4)         0 1 2 3 and 3 2 1 0   the first half of the micro-batches flows down, the second half up; two
                                              mirrored ranks hold each stage: DualPipe, Chimera
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """`routes[d][s]` is the rank that holds stage `s` for the micro-batches of route `d`."""

    routes: tuple[tuple[int, ...], ...]

    @classmethod
    def straight(cls, num_ranks: int) -> "Placement":
        return cls((tuple(range(num_ranks)),))

    @classmethod
    def interleaved(cls, num_ranks: int, num_chunks: int) -> "Placement":
        return cls((tuple(range(num_ranks)) * num_chunks,))

    @classmethod
    def vee(cls, num_ranks: int) -> "Placement":
        down = tuple(range(num_ranks))
        return cls((down + down[::-1],))

    @classmethod
    def mirrored(cls, num_ranks: int) -> "Placement":
        down = tuple(range(num_ranks))
        return cls((down, down[::-1]))

    @property
    def num_stages(self) -> int:
        return len(self.routes[0])

    @cached_property
    def num_ranks(self) -> int:
        return 1 + max(max(route) for route in self.routes)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """`stages[r]`: the stages that rank `r` holds, in the order of the routes."""
        held: list[dict[int, None]] = [{} for _ in range(self.num_ranks)]  # ordered sets
        for route in self.routes:
            for stage, rank in enumerate(route):
                held[rank][stage] = None
        return tuple(map(tuple, held))

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a replica of `stage`, in increasing order: two if mirrored, otherwise one."""
        return tuple(sorted({route[stage] for route in self.routes}))

    def route_of(self, micro_batch: int, num_micro_batches: int) -> tuple[int, ...]:
        return self.routes[micro_batch * len(self.routes) // num_micro_batches]
