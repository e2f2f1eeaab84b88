"""A step time that no order of the actions can go below, for a placement, costs and a limit on memory.

It tells how much a better order could still gain. Each rank is looked at alone:

- Its first forward starts after those of the stages in front of it. Its first backward starts after a forward through
  the whole model and the backwards of the stages behind it. Until then it can only run forwards, as many as fit into
  the time and into its memory, and none of them is in a pair. All other work comes later.
- After its last input gradient, the stages in front must run theirs. Meanwhile it can only run weight gradients: those
  outside of pairs, as many as its memory can defer.

Besides, one micro-batch must run through all stages and back.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .filled import Memory
from .placement import Placement
from .simulate import Costs, at


def least_time(placement: Placement, num_micro_batches: int, costs: Costs, memory: Memory | None = None) -> float:
    """Return a lower bound of the makespan of all schedules with this placement, in the unit of the costs.

    It is the largest of `least_times`.
    """
    return max(least_times(placement, num_micro_batches, costs, memory))


def least_times(
    placement: Placement, num_micro_batches: int, costs: Costs, memory: Memory | None = None
) -> tuple[float, ...]:
    """Return the bound of the makespan that the work of each rank gives, and the longest way of one micro-batch.

    memory: None: no limit. Raises ValueError for costs or a memory of other numbers of stages or ranks.
    """
    costs.check_stages(placement.num_stages)
    if memory is not None:
        memory.check(placement)
    each = num_micro_batches // len(placement.routes)
    chains = [_Chain.of(route, placement, costs) for route in placement.routes]
    whole = max(chain.whole for chain in chains)
    ranks = range(placement.num_ranks)
    return tuple(max(whole, _least_on(rank, placement, chains, each, costs, memory)) for rank in ranks)


@dataclass(frozen=True, slots=True)
class _Chain:
    """One micro-batch alone on its route: earliest starts by stage, and the least time after its input gradient."""

    forward: list[float]
    backward: list[float]
    after: list[float]
    whole: float

    @classmethod
    def of(cls, route: tuple[int, ...], placement: Placement, costs: Costs) -> "_Chain":
        forwards, inputs, fulls = [], [], []
        for stage, rank in enumerate(route):
            held = placement.stages[rank]
            pairs = [] if costs.FB is None else [costs.pair(stage, other) for other in held]
            mirrored = [] if costs.FB is None else [costs.pair(other, stage) for other in held]
            full = at(costs.B, stage)
            forwards.append(min(at(costs.F, stage), *pairs, math.inf))
            inputs.append(min(full - costs.weight(stage), *mirrored, math.inf))
            fulls.append(min(full, *mirrored, math.inf))
        hops = [0.0, *(costs.comm * (here != there) for here, there in pairwise(route))]
        last = len(route) - 1
        forward, backward, after = [0.0] * len(route), [0.0] * len(route), [0.0] * len(route)
        for stage in range(1, len(route)):
            forward[stage] = forward[stage - 1] + forwards[stage - 1] + hops[stage]
            below = inputs[stage - 1] + after[stage - 1] if stage > 1 else fulls[0]
            after[stage] = hops[stage] + below
        backward[last] = forward[last] + forwards[last]
        for stage in reversed(range(last)):
            backward[stage] = backward[stage + 1] + inputs[stage + 1] + hops[stage + 1]
        return cls(forward, backward, after, backward[0] + fulls[0])


def _least_on(
    rank: int, placement: Placement, chains: list[_Chain], each: int, costs: Costs, memory: Memory | None
) -> float:
    """The bound from the work of one rank."""
    routes = zip(chains, placement.routes, strict=True)
    held = [(chain, stage) for chain, route in routes for stage, where in enumerate(route) if where == rank]
    start = min(chain.forward[stage] for chain, stage in held)
    turn = min(chain.backward[stage] for chain, stage in held)  # of the first backward
    after = min(chain.after[stage] for chain, stage in held)
    stages = [stage for _, stage in held]
    total, most_held, most_deferred = each * len(stages), math.inf, math.inf
    if memory is not None:
        most_held = _most(memory.limit[rank], min(memory.activations[stage] for stage in stages))
        most_deferred = _most(memory.limit[rank], min(memory.deferred[stage] for stage in stages))
    forwards = [0.0, *accumulate(sorted((at(costs.F, s) for s in stages for _ in range(each)), reverse=True))]
    weights = [0.0, *accumulate(sorted((costs.weight(s) for s in stages for _ in range(each)), reverse=True))]
    gain = max(0.0, *(at(costs.F, i) + at(costs.B, j) - costs.pair(i, j) for i in stages for j in stages))
    work = forwards[-1] + each * sum(at(costs.B, stage) for stage in stages) - gain * total
    # least_tail[u]: with u or more forwards and backwards outside of pairs, what they and the tail add at least
    least_tail = [gain * u + max(0.0, after - weights[int(min(u, most_deferred))]) for u in range(total + 1)]
    for u in reversed(range(total)):
        least_tail[u] = min(least_tail[u], least_tail[u + 1])
    waits = turn - start
    early = (u for u in range(total + 1) if u <= most_held and (u == 0 or forwards[u - 1] < waits))
    return min(turn + work - min(forwards[u], waits) + least_tail[u] for u in early)


def _most(limit: float, size: int) -> float:
    """How many of this size fit into the limit."""
    return limit // size if size and limit < math.inf else math.inf
