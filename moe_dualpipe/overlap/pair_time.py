"""The least time of an overlapped pair: a forward and a backward of two micro-batches, in a given order.

Two clocks give the time. A computation advances the first. A transfer starts on the second once it is launched and
earlier transfers have ended. A wait moves the first clock to the end of its transfer. The events come from a recording
(tools/profiler/measure.py) or from predicted times. These are in the order of the overlap engine (overlap/engine.py):

    compute    attn(F) mlp(B) mlp(W) mlp(F) attn(B) attn(W)
    transfer   dispatch(F) dispatch(B) combine(F) combine(B)

The combine of a backward brings gradients to the experts before mlp(B), so it belongs to the layer before. On a GPU,
transfers occupy some multiprocessors: computation beside them is slower.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Computation(NamedTuple):
    """A computation. Times are in any unit."""

    time: float


class Begin(NamedTuple):
    """The launch of a transfer that takes `time`."""

    label: str
    time: float = 0.0


class Await(NamedTuple):
    """A wait for the first transfer with this label that was not yet waited for."""

    label: str


Event = Computation | Begin | Await


def least_time(events: Iterable[Event]) -> float:
    """The shortest time of these events in this order, if transfers run one after another."""
    clock = link = 0.0
    arrives: dict[str, deque[float]] = defaultdict(deque)
    for event in events:
        match event:
            case Computation(time):
                clock += time
            case Begin(label, time):
                link = max(link, clock) + time
                arrives[label].append(link)
            case Await(label) if arrives[label]:
                clock = max(clock, arrives[label].popleft())
    return clock


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """The segments of a layer for one micro-batch, in seconds. B: gradients of inputs. W: gradients of weights.

    attn_b and mlp_b include recomputation. combine_b and dispatch_b are the transfers of the backward, in its order.
    All transfers of a dense layer are 0. host: the CPU's time to launch the forward; a backward needs twice as much.
    """

    attn_f: float
    mlp_f: float
    attn_b: float
    mlp_b: float
    attn_w: float
    mlp_w: float
    dispatch_f: float = 0.0
    combine_f: float = 0.0
    combine_b: float = 0.0
    dispatch_b: float = 0.0
    host: float = 0.0

    @property
    def compute_f(self) -> float:
        return self.attn_f + self.mlp_f

    @property
    def compute_b(self) -> float:
        """Both gradients."""
        return self.attn_b + self.mlp_b + self.weights

    @property
    def seconds(self) -> float:
        """Forward and backward, with nothing hidden."""
        return self.compute_f + self.compute_b + self.transfer_f + self.transfer_b

    @property
    def weights(self) -> float:
        return self.attn_w + self.mlp_w

    @property
    def transfer_f(self) -> float:
        return self.dispatch_f + self.combine_f

    @property
    def transfer_b(self) -> float:
        return self.dispatch_b + self.combine_b


NO_LAYER = LayerSeconds(0, 0, 0, 0, 0, 0)


def pair_seconds(
    forward: Sequence[LayerSeconds], backward: Sequence[LayerSeconds], slower: float = 0.0, late: bool = False
) -> float:  # fmt: skip
    """Seconds of an overlapped pair of chunks. Layers are given in the order of the model; backward runs them reversed.

    late: mlp(W) after mlp(F), as with `WeightGrads.late`. slower: the share of the device that transfers occupy;
    computation that runs beside them takes as much longer.

    Example: one layer each, and everything takes 1: the 6 computations take 6 and hide all 4 transfers.
    """
    sent = (event for event in _pair_events(forward, backward, late) if not isinstance(event, Begin) or event.time)
    end = least_time(sent)  # a transfer without bytes does not wait for the link
    compute = sum(layer.compute_f for layer in forward) + sum(layer.compute_b for layer in backward)
    transfers = sum(layer.transfer_f for layer in forward) + sum(layer.transfer_b for layer in backward)
    hidden = max(0.0, compute + transfers - end)
    return min(compute + transfers, end + hidden * slower)


def _pair_events(forward: Sequence[LayerSeconds], backward: Sequence[LayerSeconds], late: bool) -> Iterator[Event]:
    """Yield the events of a pair in the order of the engine."""
    n = max(len(forward), len(backward), 1)  # 1: a stage may have no layers
    f = [*forward, *[NO_LAYER] * (n - len(forward))]
    b = [*reversed(backward), *[NO_LAYER] * (n - len(backward) + 1)]
    yield Begin("combine(B)", b[0].combine_b)
    for one, other, after in zip(f, b, b[1:], strict=False):
        yield from (Await("combine(F)"), Computation(one.attn_f), Begin("dispatch(F)", one.dispatch_f))
        yield from (Await("combine(B)"), Computation(other.mlp_b), Begin("dispatch(B)", other.dispatch_b))
        if not late:
            yield Computation(other.mlp_w)
        yield from (Await("dispatch(F)"), Computation(one.mlp_f), Begin("combine(F)", one.combine_f))
        if late:
            yield Computation(other.mlp_w)
        yield from (Await("dispatch(B)"), Computation(other.attn_b), Begin("combine(B)", after.combine_b))
        yield Computation(other.attn_w)
    yield from (Await("combine(F)"), Await("combine(B)"))
