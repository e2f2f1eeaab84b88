"""All orders in which the programs of several ranks can send, wait and signal, and whether all of them are safe.

The memory is as weak as that of GPUs. What a program has accessed is known

    to all of its threads      after a barrier, or after an atomic operation whose result it uses
    to a later kernel          of the same rank
    to another program         that acquires a word which this program has released after a barrier

and accesses that do not know of each other may happen in any order.

The time of a program is the number of its accesses to messages. A clock has a time for each program of all ranks:
accesses until then are known. It also has a time for each program's accesses to private cells in the current kernel.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from tests.machines.one_sided.events import Access, Atomic, Barrier, Event, HazardError, Launch, Recording

Clock = tuple[int, ...]


class Program(NamedTuple):
    """How far a program is in its list of events. The clock is what all of its threads know."""

    position: int
    path: int | None
    clock: Clock


class Word(NamedTuple):
    """A word of atomic operations. clock: what is known to those who acquire it. rank, scope: of the last writer."""

    value: int
    clock: Clock
    rank: int
    scope: str


class Cell(NamedTuple):
    """The last store, and the last load since then by each program. Times start at 1."""

    time: int
    program: int
    message: int
    loads: Clock


class State(NamedTuple):
    launches: tuple[int, ...]
    programs: tuple[tuple[Program, ...], ...]
    words: tuple[Word, ...]
    cells: tuple[Cell, ...]


def explore(recording: Recording) -> int:
    """Check all orders of a recording, and return the number of states. Raises HazardError.

    From a state, any program that need not wait can go on. It goes on until it has written a word, or has to wait. What
    it does in between enables nothing, and whether it is safe depends on clocks, not on the order.
    """
    machine = _Machine(recording)
    start = machine.start()
    seen, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        following = [*machine.following(state)]
        if not following and any(state.programs):
            raise HazardError(f"deadlock: {'; '.join(machine.waits(state))}")
        waiting += (new := [each for each in dict.fromkeys(following) if each not in seen])
        seen.update(new)
    return len(seen)


class _Machine:
    def __init__(self, recording: Recording):
        self.recording, ranks = recording, len(recording.ranks)
        self.width = max(len(launch.programs) for launches in recording.ranks for launch in launches)
        self.size = ranks * self.width  # first times of a clock
        self.zeros: Clock = (0,) * 2 * self.size
        # For each launch, the times of its programs at its start; and those of each path before each event.
        self.starts: dict[Any, list[int]] = {}
        self.times: dict[Any, list[tuple[int, int]]] = {}
        for rank, launches in enumerate(recording.ranks):
            start = [0] * self.width
            for number, launch in enumerate(launches):
                self.starts[rank, number], start = start, [*start]
                for i, paths in enumerate(launch.programs):
                    all_times = [self._count(events, start[i]) for events in paths.values()]
                    self.times |= {(rank, number, i, path): t for path, t in zip(paths, all_times, strict=True)}
                    start[i] = max(times[-1][0] for times in all_times)
            self.starts[rank, len(launches)] = start

    def _count(self, events: list[Event], start: int) -> list[tuple[int, int]]:
        accesses = [isinstance(event, Access) for event in events]
        private = [isinstance(event, Access) and event.cells[0] >= self.recording.private for event in events]
        message = [access and not own for access, own in zip(accesses, private, strict=True)]
        return [*zip(accumulate(message, initial=start), accumulate(private, initial=0), strict=True)]

    def start(self) -> State:
        ranks = range(len(self.recording.ranks))
        words = (Word(0, self.zeros, 0, "sys"),) * len(self.recording.words)
        cells = (Cell(0, 0, -1, self.zeros),) * len(self.recording.cells)
        return State((0,) * len(ranks), tuple(self._programs(rank, 0, self.zeros) for rank in ranks), words, cells)

    def _programs(self, rank: int, number: int, clock: Clock) -> tuple[Program, ...]:
        """The programs of a launch at its start. None after the last launch."""
        launches = self.recording.ranks[rank]
        paths = launches[number].programs if number < len(launches) else ()
        return tuple(Program(0, next(iter(each)), clock) for each in paths)

    def following(self, state: State) -> Iterator[State]:
        """The states after one program has gone on."""
        for rank, programs in enumerate(state.programs):
            for i in range(len(programs)):
                words, cells = [*state.words], [*state.cells]
                after = self._go_on(state, rank, i, words, cells)
                if after.position > programs[i].position:
                    new = _replace(programs, i, after)
                    number = state.launches[rank]
                    if all(map(self._ended, [self.recording.ranks[rank][number]] * len(new), range(len(new)), new)):
                        number, new = number + 1, self._next_launch(rank, number + 1, new, words, cells)
                    launches, programs_R = _replace(state.launches, rank, number), _replace(state.programs, rank, new)
                    yield State(launches, programs_R, tuple(words), tuple(cells))

    def _ended(self, launch: Launch, i: int, program: Program) -> bool:
        return program.position == len(launch.programs[i][program.path])

    def _next_launch(
        self, rank: int, number: int, ended: tuple[Program, ...], words: list[Word], cells: list[Cell]
    ) -> tuple[Program, ...]:
        """The programs of the next launch, which know all that the rank has done. So private times start again."""
        clock = [*map(max, zip(*(program.clock for program in ended), strict=True))]
        clock[rank * self.width : (rank + 1) * self.width] = self.starts[rank, number]
        for i, word in enumerate(words):
            if word.rank == rank:
                words[i] = word._replace(clock=self._public(word.clock))
        mine = range(self.size + rank * self.width, self.size + (rank + 1) * self.width)
        for i, cell in enumerate(cells):
            if cell.program in mine or any(cell.loads[program] for program in mine):
                cells[i] = Cell(0, 0, -1, self.zeros)
        return self._programs(rank, number, self._public(clock))

    def _public(self, clock: Any) -> Clock:
        return (*clock[: self.size], *self.zeros[self.size :])

    def _go_on(self, state: State, rank: int, i: int, words: list[Word], cells: list[Cell]) -> Program:
        """The program after it has written a word, or cannot go on."""
        number, me, wrote = state.launches[rank], rank * self.width + i, False
        launch = self.recording.ranks[rank][number]
        position, path, clock = state.programs[rank][i]
        while not wrote and position < len(launch.programs[i][path]):
            event, times = launch.programs[i][path][position], self.times[rank, number, i, path][position]
            match event:
                case Access():
                    private = event.cells[0] >= self.recording.private
                    for cell in event.cells:
                        access = me + self.size * private, times[private] + 1, clock, launch
                        cells[cell] = (self._store if event.store else self._load)(cells[cell], cell, *access)
                case Barrier():
                    clock = self._barrier(clock, me, times)
                case Atomic():
                    word = words[event.word]
                    if event.wanted is not None and word.value < event.wanted:
                        break
                    if event.writes and not event.exchange:
                        path = word.value
                        if path not in launch.programs[i]:
                            raise HazardError(f"{self._who(me, launch)} finds that {path} programs have ended")
                    wrote = event.writes
                    words[event.word], clock = self._act(event, word, rank, clock)
                    if not event.exchange:  # an addition has a result
                        clock = self._barrier(clock, me, times)
            position += 1
        return Program(position, path, clock)

    def _barrier(self, clock: Clock, me: int, times: tuple[int, int]) -> Clock:
        return _replace(_replace(clock, me, times[0]), me + self.size, times[1])

    def _act(self, event: Atomic, word: Word, rank: int, clock: Clock) -> tuple[Word, Clock]:
        """The word and the clock after an atomic operation."""
        new = word
        if event.writes:
            value, before = (event.operand, self.zeros) if event.exchange else (word.value + event.operand, word.clock)
            known = clock if event.sem in ("release", "acq_rel") else self.zeros
            new = Word(value, tuple(map(max, known, before)), rank, event.scope)
        scopes, same = {word.scope, event.scope}, word.rank == rank
        reached = scopes == {"sys"} or (same and "cta" not in scopes)
        if reached and event.sem in ("acquire", "acq_rel"):
            clock = tuple(map(max, clock, word.clock if same else self._public(word.clock)))
        return new, clock

    def _load(self, cell: Cell, number: int, me: int, time: int, clock: Clock, launch: Launch) -> Cell:
        if cell.time > clock[cell.program]:
            raise HazardError(self._race(me, launch, "loads", number, cell.program, "storing to it"))
        if number < self.recording.private and cell.message != launch.message:
            found = "nothing" if cell.message < 0 else f"message {cell.message}"
            raise HazardError(f"{self._who(me, launch)} finds {found} in {self.recording.cells[number]}")
        return cell._replace(loads=_replace(cell.loads, me, time))

    def _store(self, cell: Cell, number: int, me: int, time: int, clock: Clock, launch: Launch) -> Cell:
        if cell.time > clock[cell.program]:
            raise HazardError(self._race(me, launch, "stores to", number, cell.program, "storing to it"))
        for program, loaded in enumerate(cell.loads):
            if loaded > clock[program]:
                raise HazardError(self._race(me, launch, "stores to", number, program, "loading it"))
        return Cell(time, me, launch.message, self.zeros)

    # ---- errors ----

    def _who(self, program: int, launch: Launch) -> str:
        return f"{self._name(program)}, in {launch.kernel} of message {launch.message},"

    def _name(self, program: int) -> str:
        rank, i = divmod(program % self.size, self.width)
        return f"program {i} of rank {rank}"

    def _race(self, me: int, launch: Launch, does: str, cell: int, other: int, doing: str) -> str:
        name = "another of its threads" if other == me else self._name(other)
        return f"{self._who(me, launch)} {does} {self.recording.cells[cell]} while {name} may be {doing}"

    def waits(self, state: State) -> Iterator[str]:
        """What programs wait for."""
        for rank, programs in enumerate(state.programs):
            for i, (position, path, _) in enumerate(programs):
                launch = self.recording.ranks[rank][state.launches[rank]]
                if position < len(events := launch.programs[i][path]):
                    wait = events[position]
                    assert isinstance(wait, Atomic)
                    name = self.recording.words[wait.word]
                    yield f"{self._who(rank * self.width + i, launch)} waits for {wait.wanted} in {name}"


def _replace(items: tuple, index: int, item: Any) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
