"""Which collective a kernel belongs to.

Kineto writes the arguments of a collective to its kernels. Where it does not, the call of the collective on the host
has them, and the kernel was launched inside that call. Otherwise the name of the call, such as "nccl:all_to_all", is
all that is known.
"""

from typing import Any

from ..communication import NAMES
from ..trace import Collective, HostEvent, Trace

_NOT_TRANSFERS = ("wait", "init")


def whole(value: object) -> int | None:
    """A count or an index, also as a string; None if it is not valid."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        value = int(value)
    return value if type(value) is int and 0 <= value < 2**31 else None


def size(value: object) -> int | None:
    """A number of elements or bytes; None if it is not valid."""
    return value if type(value) is int and 0 <= value < 2**63 else None


class RecordedCollectives:
    """The collectives of one trace. Equal ones are kept once."""

    def __init__(self) -> None:
        self._known: dict[Collective, Collective] = {}
        self._calls: list[tuple[HostEvent, Collective]] = []

    def read(self, arguments: dict[str, Any]) -> Collective:
        """The collective in the arguments of an event."""
        name = str(arguments["Collective name"])
        num_ranks = whole(arguments.get("Group size")) or 0
        peer = arguments.get("Dst Rank" if "send" in name.lower() else "Src Rank")
        found = Collective(
            name, str(arguments.get("Process Group Name", arguments.get("Process Group ID", ""))),
            str(arguments.get("Process Group Description", "")), _ranks(arguments, num_ranks), num_ranks,
            size(arguments.get("In msg nelems")), size(arguments.get("Out msg nelems")),
            str(arguments.get("dtype", "")), whole(arguments.get("Seq")), whole(peer),
        )  # fmt: skip
        return self._known.setdefault(found, found)

    def add_call(self, call: HostEvent, arguments: dict[str, Any]) -> None:
        """Take note of a call of a collective on the host."""
        collective = self.read(arguments)
        if collective.name not in _NOT_TRANSFERS:
            self._calls.append((call, collective))

    def connect(self, trace: Trace) -> None:
        """Give transfers the collective of the call that launched them, or its name, if they have none.

        Groups whose ranks are not recorded with the collective take them from the list of groups.
        """
        by_call = {id(call): collective for call, collective in self._calls}
        around = trace.innermost_around([call for call, _ in self._calls])
        _connect(trace, {number: by_call[id(call)] for number, call in around.items()})
        named = trace.innermost_on_thread(trace.transfers)
        _connect(trace, {number: Collective(call.name.partition(":")[2]) for number, call in named.items()})
        for i, event in enumerate(trace.device_events):
            found = event.collective
            if found is not None and not found.ranks and found.group in trace.groups:
                known = found._replace(ranks=trace.groups[found.group])
                trace.device_events[i] = event._replace(collective=self._known.setdefault(known, known))


def _ranks(arguments: dict[str, Any], num_ranks: int) -> tuple[int, ...]:
    """The ranks of a group; kineto elides long lists, such as "[0, 1, ..., 63]"."""
    words = str(arguments.get("Process Group Ranks", "")).strip("[]").replace(",", " ").split()
    ranks = tuple(number for number in map(whole, words) if number is not None)
    first, step = whole(arguments.get("Global rank start")), whole(arguments.get("Global rank stride"))
    if len(ranks) < len(words) or not ranks:
        ranks = ()
        if first is not None and step and num_ranks < 1 << 20:
            ranks = tuple(range(first, first + step * num_ranks, step))
    return ranks if len(ranks) == num_ranks or not num_ranks else ()


def _connect(trace: Trace, known: dict[int, Collective]) -> None:
    """Give transfers without a collective the one with their correlation id."""
    for i, event in enumerate(trace.device_events if known else ()):
        if event.correlation in known and event.collective is None and NAMES.kind_of(event) == "comm":
            trace.device_events[i] = event._replace(collective=known[event.correlation])
