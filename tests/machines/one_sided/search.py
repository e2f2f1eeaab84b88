"""Whether what the programs of several ranks send, wait for and signal is safe in all orders in which they may run.

The memory is as weak as that of GPUs. What a program has accessed is known

    to all of its threads      after a barrier, or after an atomic operation whose result it uses
    to a later kernel          of the same rank
    to another program         that acquires a word which this program has released after a barrier

and accesses that do not know of each other may happen in any order. A word is written by one rank, and a wait is for a
number that it reaches and does not leave again. So the same accesses know of each other in all orders, and one run
with vector clocks finds every pair that does not, as if each wait ended at the first number that is large enough.

The time of a program is the number of its accesses. A clock has a time for each program of all ranks: accesses until
then are known.
"""

from collections.abc import Iterator
from typing import Any

from tests.machines.one_sided.events import Access, Atomic, Barrier, HazardError, Launch, Recording

Clock = list[int]


def explore(recording: Recording) -> int:
    """Check a recording, and return the number of events. Raises HazardError."""
    width = max(len(launch.programs) for launches in recording.ranks for launch in launches)
    return _Run(recording, width).run()


class _Run:
    def __init__(self, recording: Recording, width: int):
        self.recording, self.width, self.events = recording, width, 0
        self.times = [0] * len(recording.ranks) * width
        # Of each word, what was written: value, what is known to those who acquire it, rank, scope.
        self.words = [[(0, [0] * len(self.times), 0, "sys")] for _ in recording.words]
        # Of each cell, the time, program and message of the last store, and the last load since then by each program.
        self.stores, self.loads = [(0, 0, -1) for _ in recording.cells], [{} for _ in recording.cells]

    def run(self) -> int:
        running = [self._rank(rank, launches) for rank, launches in enumerate(self.recording.ranks)]
        while running:
            before, waits = self.events, [next(rank, None) for rank in running]
            if self.events == before and any(waits):
                raise HazardError(f"deadlock: {'; '.join(each for wait in waits for each in wait or ())}")
            running = [rank for rank, wait in zip(running, waits, strict=True) if wait is not None]
        return self.events

    def _rank(self, rank: int, launches: list[Launch]) -> Iterator[list[str]]:
        """Run the kernels of a rank, each after the one before it. Yields what its programs wait for."""
        clock = [0] * len(self.times)
        for launch in launches:
            clocks = [[*clock] for _ in launch.programs]
            running = [self._program(rank, i, launch, own) for i, own in enumerate(clocks)]
            while running:
                waits = [next(program, None) for program in running]
                running = [program for program, wait in zip(running, waits, strict=True) if wait is not None]
                yield [wait for wait in waits if wait is not None]
            clock = [*map(max, clock, *clocks)]
            mine = slice(rank * self.width, (rank + 1) * self.width)
            clock[mine] = self.times[mine]

    def _program(self, rank: int, i: int, launch: Launch, clock: Clock) -> Iterator[str]:
        """Run a program. Yields what it waits for. The clock is what all of its threads know."""
        me = rank * self.width + i
        for event in launch.programs[i]:
            match event:
                case Access():
                    self.times[me] += 1
                    for cell in event.cells:
                        self._access(event, cell, me, clock, launch)
                case Atomic():
                    while self.words[event.word][-1][0] < (event.wanted or 0):
                        yield f"{self._who(me, launch)} waits for {event.wanted} in {self.recording.words[event.word]}"
                    self._act(event, rank, clock)
            if isinstance(event, Barrier) or (isinstance(event, Atomic) and not event.exchange):
                clock[me] = self.times[me]  # a load has a result
            self.events += 1

    def _act(self, event: Atomic, rank: int, clock: Clock) -> None:
        """Write a word, or learn what is known to the rank that wrote the number that a wait is for."""
        written = self.words[event.word]
        if event.exchange:
            published = clock if event.sem == "release" else [0] * len(clock)
            written.append((event.operand, [*map(max, published, written[-1][1])], rank, event.scope))
            return
        _, known, writer, scope = next(w for w in written if w[0] >= (event.wanted or 0))
        if event.sem == "acquire" and (scope == event.scope == "sys" or writer == rank):
            clock[:] = map(max, clock, known)

    def _access(self, event: Access, cell: int, me: int, clock: Clock, launch: Launch) -> None:
        time, program, message = self.stores[cell]
        name = self.recording.cells[cell]
        does = f"{self._who(me, launch)} {'stores to' if event.store else 'loads'} {name} while"
        if time > clock[program]:
            raise HazardError(f"{does} {self._name(program, me)} may be storing to it")
        if event.store:
            for program, time in self.loads[cell].items():
                if time > clock[program]:
                    raise HazardError(f"{does} {self._name(program, me)} may be loading it")
            self.stores[cell], self.loads[cell] = (self.times[me], me, launch.message), {}
        elif cell < self.recording.private and message != launch.message:
            found = "nothing" if message < 0 else f"message {message}"
            raise HazardError(f"{self._who(me, launch)} finds {found} in {name}")
        else:
            self.loads[cell][me] = self.times[me]

    # ---- errors ----

    def _who(self, program: int, launch: Launch) -> str:
        return f"{self._name(program)}, in {launch.kernel} of message {launch.message},"

    def _name(self, program: int, me: Any = None) -> str:
        rank, i = divmod(program, self.width)
        return "another of its threads" if program == me else f"program {i} of rank {rank}"
