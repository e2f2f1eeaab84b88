"""How a model is divided over ranks, as one value for training, planning and checks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..messages import plural


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel degrees, and the place of one rank among them.

    pp: ranks that share the layers. dp: ranks that divide the sequences. cp: ranks that share each sequence. ep: ranks,
    of the dp x cp with the same layers, that share the experts of each. chunks: stages of a pipeline rank, for
    schedules with a choice; None: the schedule's default. tp: ranks that share each matrix; only the planner uses it.

    rank = (pipeline rank x dp + data-parallel rank) x cp + context rank.
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    rank: int = 0
    chunks: int | None = None
    tp: int = 1
    cp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.tp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks with copies of the same dense parameters."""
        return self.dp * self.cp

    @property
    def pp_rank(self) -> int:
        return self.rank // self.replicas

    @property
    def replica(self) -> int:
        """The index among the `replicas`."""
        return self.rank % self.replicas

    @property
    def dp_rank(self) -> int:
        return self.replica // self.cp

    def world_rank(self, pp_rank: int, replica: int) -> int:
        return pp_rank * self.replicas + replica


def layouts(num_ranks: int, num_layers: int, num_experts: int, cp: int = 1) -> Iterator[Layout]:
    """All layouts of `num_ranks` ranks with a layer or more on each pipeline rank, and experts divided evenly."""
    for pp in divisors(num_ranks // cp) if num_ranks % cp == 0 else ():
        if pp <= num_layers:
            dp = num_ranks // (pp * cp)
            yield from (Layout(pp, dp, ep, cp=cp) for ep in divisors(math.gcd(dp * cp, num_experts)))


def check_ep(ep: int, num_experts: int, dp: int | None = None, ranks: str = "") -> None:
    """Raise ValueError, with the nearest that does, unless `ep` divides the experts and the data-parallel ranks `dp`.

    dp: None: it follows from `ep`. ranks: the origin of `dp`, for the error.
    """
    dp = dp or ep
    if num_experts % ep or dp % ep:
        what = plural(num_experts, "expert") if num_experts % ep else plural(dp, "data-parallel rank") + ranks
        use = min(divisors(math.gcd(num_experts, dp) if dp != ep else num_experts), key=lambda n: abs(n - ep))
        raise ValueError(f"--ep {ep} does not divide {what}: use --ep {use}")


def check_cp(cp: int, replicas: int) -> None:
    """Raise ValueError, with the nearest that does, unless `cp` divides `replicas`, processes / pp."""
    if replicas % cp:
        use = min(divisors(replicas), key=lambda n: abs(n - cp))
        raise ValueError(f"--cp {cp} does not divide {replicas}, processes / --pp: use --cp {use}")


def divisors(number: int) -> list[int]:
    """All divisors, in order. Example: 12 -> [1, 2, 3, 4, 6, 12]."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
