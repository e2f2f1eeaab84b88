"""What threads of a Hopper kernel may do to barriers and buffers in shared memory, and all orders in which they can.

An action is a tuple, for example ("wait", barrier, phase) or ("multiply", buffer, buffer). `act` does it, and raises
HazardError if it is not safe. `explore` does the actions of all threads in all orders.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Action = tuple[Any, ...]
Key = Any


class HazardError(Exception):
    """The kernel deadlocks, or does something that is not safe on a GPU."""


class Barrier(NamedTuple):
    """A phase is over when `pending` arrivals and `size` bytes have come. A wait sees only whether it is odd."""

    count: int
    phase: int
    pending: int
    size: int

    def receive(self, arrivals: int, size: int) -> "Barrier":
        pending, size = self.pending - arrivals, self.size + size
        if pending < 0:
            raise HazardError("a barrier has too many arrivals")
        if not pending and not size:
            return new_barrier(self.count, self.phase + 1)
        return Barrier(self.count, self.phase, pending, size)

    def is_over(self, phase: int) -> bool:
        return self.phase % 2 != phase


def new_barrier(count: int, phase: int = 0) -> Barrier:
    return Barrier(count, phase % 2, count, 0)


class Buffer(NamedTuple):
    """Copies to it that have not arrived, and reads of it that are not known to be finished.

    fenced: whether products and TMA, which read through the asynchronous proxy, see what threads have written.
    """

    loading: int = 0
    readers: int = 0
    fenced: bool = True


class Copy(NamedTuple):
    """A running copy to buffers. At its end, a barrier receives arrivals or bytes."""

    keys: tuple[Key, ...]
    barrier: int
    arrivals: int
    size: int
    by_threads: bool


def act(action: Action, barriers: list[Barrier], buffers: dict[Key, Buffer], copies: list[Copy]) -> None:
    match action:
        case ("load", key, barrier, size):  # by TMA
            _touch("load", key, buffers)
            copies.append(Copy((key,), barrier, 0, -size, False))
        case ("copies arrive", barrier, arrivals, keys):
            copies.append(Copy(keys, barrier, arrivals, 0, True))
        case ("expect", barrier, size):
            barriers[barrier] = barriers[barrier].receive(1, size)
        case ("arrive", barrier):
            barriers[barrier] = barriers[barrier].receive(1, 0)
        case ("fence",):
            for key, buffer in buffers.items():
                buffers[key] = buffer._replace(fenced=buffer.fenced or not buffer.loading)
        case ("finished", *keys):
            for key in keys:
                buffers[key] = buffers[key]._replace(readers=buffers[key].readers - 1)
        case ("wait", _, _):
            pass
        case (name, *keys):  # copy, write, read, multiply, store
            for key in keys:
                _touch(name, key, buffers)


def _touch(name: str, key: Key, buffers: dict[Key, Buffer]) -> None:
    loading, readers, fenced = buffers.get(key, Buffer())
    if name in ("load", "copy", "write") and readers:
        raise HazardError(f"{name} to buffer {key}, which is still being read")
    if loading:
        raise HazardError(f"{name} of buffer {key}, to which a copy is running")
    if name in ("multiply", "store") and not fenced:
        raise HazardError(f"{name} of buffer {key} without a fence")
    reads = name in ("multiply", "store")
    buffers[key] = Buffer(loading + (name in ("load", "copy")), readers + reads, fenced and name != "write")


def finish(copy: Copy, barriers: list[Barrier], buffers: dict[Key, Buffer]) -> None:
    for key in copy.keys:
        buffers[key] = Buffer(buffers[key].loading - 1, buffers[key].readers, not copy.by_threads)
    barriers[copy.barrier] = barriers[copy.barrier].receive(copy.arrivals, copy.size)


def explore(traces: list[list[Action]], counts: list[int]) -> int:
    """Check all orders of `traces`, the actions of each thread. Return the number of states.

    counts: arrivals of each barrier. What only one thread uses, it can wait for only alone: its actions with these
    barriers and buffers are checked apart from those with shared ones.
    """
    users: dict[Key, set[int]] = {}
    for i, trace in enumerate(traces):
        for action in trace:
            for key in _objects(action):
                users.setdefault(key, set()).add(i)
    own = {key for key, threads in users.items() if len(threads) == 1}
    parts = [[_with_objects(trace, lambda key: key not in own) for trace in traces]]
    parts += [[_with_objects(trace, lambda key: key in own)] for trace in traces]
    return sum(_explore(part, counts) for part in parts)


def _objects(action: Action) -> list[Key]:
    """The buffers and barriers of an action."""
    match action:
        case ("load", key, barrier, _):
            return [key, barrier]
        case ("copies arrive", barrier, _, keys):
            return [barrier, *keys]
        case ("wait" | "expect" | "arrive", barrier, *_):
            return [barrier]
    return list(action[1:])


def _with_objects(trace: list[Action], wanted: Callable[[Key], bool]) -> list[Action]:
    """The actions with wanted objects only, and all fences."""
    result = []
    for action in trace:
        if action[0] == "finished":
            result.append(("finished", *filter(wanted, action[1:])))
        elif all(map(wanted, _objects(action))):
            result.append(action)
    return result


def _explore(traces: list[list[Action]], counts: list[int]) -> int:
    """Check all orders, as states: how far each thread is, the barriers, the buffers, and the running copies.

    From a state, any thread that need not wait can go on, and any copy can finish. A thread goes on until it has
    arrived at a barrier, or would wait for one. What it does in between enables nothing; and if it is unsafe together
    with an action of another thread, it is so in the order where that comes first, or second.
    """
    start = (0,) * len(traces), tuple(map(new_barrier, counts)), (), ()
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        following = [*_after_threads(state, traces), *_after_copies(state)]
        if not following and any(i < len(trace) for i, trace in zip(state[0], traces, strict=True)):
            raise HazardError("deadlock")
        new = set(following) - seen
        seen |= new
        waiting += new
    return len(seen)


def _after_threads(state: Any, traces: list[list[Action]]) -> Iterator[Any]:
    """The states after one thread has gone on."""
    positions, *rest = state
    for i, trace in enumerate(traces):
        barriers, buffers, copies = list(rest[0]), dict(rest[1]), list(rest[2])
        position = positions[i]
        while position < len(trace):
            action = trace[position]
            if action[0] == "wait" and not barriers[action[1]].is_over(action[2]):
                break
            act(action, barriers, buffers, copies)
            position += 1
            if action[0] == "arrive":
                break
        if position > positions[i]:
            yield _state((*positions[:i], position, *positions[i + 1 :]), barriers, buffers, copies)


def _after_copies(state: Any) -> Iterator[Any]:
    """The states after one copy has finished."""
    positions, *rest = state
    for i, copy in enumerate(rest[2]):
        barriers, buffers = list(rest[0]), dict(rest[1])
        finish(copy, barriers, buffers)
        yield _state(positions, barriers, buffers, [*rest[2][:i], *rest[2][i + 1 :]])


def _state(positions, barriers, buffers, copies):
    used = sorted(item for item in buffers.items() if item[1] != Buffer())
    return positions, tuple(barriers), tuple(used), tuple(sorted(copies))
