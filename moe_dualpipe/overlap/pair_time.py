"""The least time of an overlapped pair: a forward and a backward of two micro-batches, in a given order.

Two clocks give the time. A computation advances the first. A transfer starts on the second once it is launched and
earlier transfers have ended. A wait moves the first clock to the end of its transfer. The events come from a recording
(tools/profiler/measure.py) or from predicted times. These are in the order of the overlap engine (overlap/engine.py):

    compute    attn(F) mlp(B) mlp(W) mlp(F) attn(B) attn(W)
    transfer   dispatch(F) dispatch(B) combine(F) combine(B)

With keys gathered before attention, a layer has three transfers, in the orders that engine.py states. On a GPU,
transfers occupy some multiprocessors: computation beside them is slower.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
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


Segment = tuple[float, float, str, float]
"""A computation, its deferred weight gradients, and the label and time of the transfer after it. "": there is none."""


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """The segments of a layer for one micro-batch, in seconds. B: gradients of inputs. W: gradients of weights.

    attn_b, mlp_b and qkv_b include recomputation. combine_b, dispatch_b and keys_b are the transfers of the backward.
    All transfers of a dense layer are 0, except keys. Without a transfer of keys, qkv is a part of attn. host: the
    CPU's time to launch the forward; a backward needs twice as much.
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
    qkv_f: float = 0.0
    qkv_b: float = 0.0
    qkv_w: float = 0.0
    keys_f: float = 0.0
    keys_b: float = 0.0
    host: float = 0.0

    @property
    def forward(self) -> tuple[Segment, ...]:
        return (
            (self.qkv_f, 0.0, "keys(F)" if self.keys_f else "", self.keys_f),
            (self.attn_f, 0.0, "dispatch(F)", self.dispatch_f),
            (self.mlp_f, 0.0, "combine(F)", self.combine_f),
        )

    @property
    def backward(self) -> tuple[Segment, ...]:
        """It begins with a transfer: combine brings gradients to the experts."""
        return (
            (0.0, 0.0, "combine(B)", self.combine_b),
            (self.mlp_b, self.mlp_w, "dispatch(B)", self.dispatch_b),
            (self.attn_b, self.attn_w, "keys(B)" if self.keys_b else "", self.keys_b),
            (self.qkv_b, self.qkv_w, "", 0.0),
        )

    @property
    def seconds_f(self) -> float:
        """Of the forward, with nothing hidden."""
        return sum(compute + time for compute, _, _, time in self.forward)

    @property
    def seconds_b(self) -> float:
        """Of both gradients, with nothing hidden."""
        return sum(compute + weights + time for compute, weights, _, time in self.backward)

    @property
    def transfers(self) -> float:
        return sum(time for *_, time in (*self.forward, *self.backward))

    @property
    def weights(self) -> float:
        return self.attn_w + self.mlp_w + self.qkv_w


def pair_seconds(
    forward: Sequence[LayerSeconds], backward: Sequence[LayerSeconds], slower: float = 0.0, opens: int = 1
) -> float:
    """Seconds of an overlapped pair of chunks. Layers are given in the order of the model; backward runs them reversed.

    slower: the share of the device that transfers occupy; computation that runs beside them takes as much longer.
    opens: see `Comm`; 1 without keys.

    Example: one layer each, and everything takes 1: the 6 computations take 6 and hide all 4 transfers.
    """
    end = least_time(_pair_events(forward, backward, opens))
    alone = sum(layer.seconds_f for layer in forward) + sum(layer.seconds_b for layer in backward)
    return min(alone, end + max(0.0, alone - end) * slower)


def _pair_events(forward: Sequence[LayerSeconds], backward: Sequence[LayerSeconds], opens: int) -> Iterator[Event]:
    """Yield the events of a pair in the order of the engine."""
    first = _turns((segment for layer in forward for segment in layer.forward), opens)
    second = _turns((segment for layer in reversed(backward) for segment in layer.backward), opens)
    ahead = 0
    for turn, transfer in second:
        yield from turn
        if opens or transfer != "combine(B)":
            ahead = (opens - 1) * (transfer == "combine(B)")
            break
    for turn, _ in islice(first, ahead):
        yield from turn
    for (one, _), (other, _) in zip_longest(first, second, fillvalue=((), "")):
        yield from (*one, *other)


def _turns(segments: Iterable[Segment], opens: int) -> Iterator[tuple[Sequence[Event], str]]:
    """What a lane runs at a time: up to its next transfer, whose label comes with it, and deferred weight gradients.

    Without keys, the lanes also take turns where a layer without experts would have transfers. So they did when the
    constants of the planner were fitted.
    """
    turn: list[Event] = []
    deferred = 0.0
    for compute, weights, transfer, time in segments:
        turn.append(Computation(compute))
        deferred += weights
        if time or (transfer and opens == 1):
            begin = [Begin(transfer, time)] * (time > 0)  # without bytes, it does not wait for the link
            yield [*turn, *begin, Computation(deferred)], transfer
            turn = [Await(transfer)]
            deferred = 0.0
    yield [*turn, Computation(deferred)], ""
