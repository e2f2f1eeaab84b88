"""Run the check on this rank. Rank 0 decides, and has the report; the others follow its messages in the store.

1. Each rank gathers its facts and tells them to rank 0, which finds out whose machine is missing, and whose clock is
   off.
2. Unless a problem stops it, all ranks create a process group and measure their links. Suspicious links are measured
   up to two times more, and the best time counts: other programs also slow a link down.
3. Rank 0 tells the exit code.

Every step ends in time, on every rank: see steps.py.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...messages import list_ranks, plural
from ...runtime.groups import init_world
from ...runtime.launch import Launch
from ...runtime.layout import divisors
from .bounded_calls import Ended, Steps, run_watched
from .disks import remove_mark
from .facts import Facts, Machine, machines_of
from .link_verdicts import find_link_problems, suspects
from .links import Exchange, Links, LinkSpeed
from .probes import gather_facts
from .rendezvous import Meeting
from .report import Report
from .rounds import Pair, rounds_of
from .transports import NcclLog
from .verdicts import Needs, Problem, device_of, find_problems

_MORE_TRIES = 2
_MARGIN = 5.0
"""Seconds that a message may take, beyond what its sender may."""
_NOT_MEASURED = "Links were not measured: first solve the problems below."


@dataclass(frozen=True, slots=True)
class Options:
    """ep: ranks of an expert group; None: all ranks. out: output folder. size: bytes of a message. timeout: seconds."""

    ep: int | None = None
    out: Path = Path("runs")
    size: int = 16 << 20
    timeout: float = 60.0
    min_free: int = 10 * 10**9
    device: str = "auto"

    @property
    def needs(self) -> Needs:
        return Needs(self.min_free, self.device)


@dataclass(frozen=True, slots=True)
class Outcome:
    """code: exit code. report: on rank 0 only. stuck: threads are left that may keep the process from exiting."""

    code: int
    report: Report | None = None
    stuck: bool = False


Gather = Callable[[Launch, Path, Steps], Facts]


def check_cluster(
    options: Options, launch: Launch | None = None, gather: Gather = gather_facts,
    now: Callable[[], float] = time.time,
) -> Outcome:  # fmt: skip
    """Check this machine or, with several processes, all of them. Collective.

    launch: the place of this process; None: that of the environment. gather, now: read the machine and its clock.
    Raises ValueError for invalid options, and ConnectionError if rank 0 does not answer.
    """
    launch = launch or Launch.from_environment()
    check_options(options, launch.world_size)
    own = _gather_own(options, launch, gather)
    if launch.world_size == 1 or own.port_user:
        return _check_alone(options, launch, own)
    rank = _Rank(options, launch, own, now)
    # The rendezvous store may freeze. Each of its steps takes at most a few timeouts, and says what it waited for.
    ended = run_watched(lambda steps: rank.run(steps), 4 * options.timeout + 6 * _MARGIN)
    remove_mark(own.disk)
    if ended.value is None:
        raise ConnectionError(f"rank {launch.rank} on {own.host}: {ended.failure}")
    return ended.value


def check_options(options: Options, world_size: int) -> None:
    """Raises ValueError for invalid options."""
    ep = options.ep
    if ep is not None and (ep < 1 or world_size % ep):
        use = " or ".join(map(str, divisors(world_size)))
        raise ValueError(f"--ep {ep} does not divide the {plural(world_size, 'rank')}: use --ep {use}")


def _gather_own(options: Options, launch: Launch, gather: Gather) -> Facts:
    ended = run_watched(lambda steps: gather(launch, options.out, steps), options.timeout)
    if ended.value is not None:
        return ended.value
    return Facts(launch.rank, socket.gethostname(), local_rank=launch.local_rank, local_size=launch.local_world_size,
                 failed=ended.failure)  # fmt: skip


def _check_alone(options: Options, launch: Launch, own: Facts) -> Outcome:
    """Check only this machine: there are no others, or they cannot be reached."""
    remove_mark(own.disk)
    problems, note = find_problems([own], launch.world_size, options.needs), _NOT_MEASURED
    if launch.world_size == 1:
        note = "One process: links between ranks were not measured. torchrun starts more."
    report = Report(launch.world_size, device_of([own], options.device), [own], problems, note=note)
    return Outcome(0 if report.passed else 1, report, stuck=bool(own.failed))


class _Rank:
    """One of several ranks. All messages and their order are here."""

    meeting: Meeting
    links: Links  # once `_start` has created the process group

    def __init__(self, options: Options, launch: Launch, own: Facts, now: Callable[[], float]):
        self.options, self.launch, self.own, self.now = options, launch, own, now
        self.timeout, self.stuck, self.created = options.timeout, bool(own.failed), False

    def run(self, steps: Steps) -> Outcome:
        self.steps = steps
        steps.start("connecting to the rendezvous store")
        self.meeting = Meeting(self.launch, self.timeout)
        steps.start("meeting the other ranks")
        self.meeting.tell(f"facts/{self.launch.rank}", self.own.to_json())
        report = self._lead(steps) if self.launch.rank == 0 else self._follow(steps)
        steps.start("leaving")
        if report is not None:
            self.meeting.tell("code", 0 if report.passed else 1)
        code = self.meeting.hear("code", self.timeout + 2 * _MARGIN)
        self.meeting.leave(len(report.facts) if report is not None else 0, _MARGIN)
        if self.created and not self.stuck:
            dist.destroy_process_group()
        return Outcome(code, report, self.stuck)

    # ---- Rank 0 ----

    def _lead(self, steps: Steps) -> Report:
        heard, missing = self.meeting.collect("facts", self.timeout)
        facts = [Facts.from_json(heard[rank]) for rank in sorted(heard)]
        problems = [] if not missing else [self._missing(facts, missing)]
        if not missing:
            facts = self._compare_machines(facts, steps)
        problems += find_problems(facts, self.launch.world_size, self.options.needs)
        device = device_of(facts, self.options.device)
        report = Report(self.launch.world_size, device, facts, problems)
        if any(problem.stops for problem in problems):
            self.meeting.tell("plan", None)
            return replace(report, note=_NOT_MEASURED)
        machines = machines_of(facts)
        homes = [machine.numbers for machine in machines]
        self.meeting.tell("plan", {"device": device, "machines": homes})
        links, exchanges, failures = self._measure(steps, device, rounds_of(homes), machines)
        problems = [*problems, *failures, *find_link_problems(links, exchanges, machines)]
        return replace(report, problems=problems, links=links, exchanges=exchanges)

    def _missing(self, facts: Sequence[Facts], missing: list[int]) -> Problem:
        here = ", ".join(machine.name for machine in machines_of(facts))
        who = list_ranks(missing) if len(missing) < 9 else f"{list_ranks(missing[:8])} ..."
        waited = f"waited {self.timeout:g} s for {len(missing)} of {self.launch.world_size} ranks: {who}"
        way_out = "start them, and look for a firewall or errors on their machines"
        return Problem("rendezvous", f"{waited} (ranks of {here} are here)", way_out, True)

    def _compare_machines(self, facts: Sequence[Facts], steps: Steps) -> list[Facts]:
        """Add what only several machines can find out: clocks, and whether they share the output folder."""
        firsts = [machine.first for machine in machines_of(facts)]
        mark = facts[0].disk.mark if facts[0].disk else ""
        self.meeting.tell("compare", {"firsts": [one.rank for one in firsts], "mark": mark})
        steps.start("comparing the clocks")
        clocks = {0: (0.0, 0.0)} | self.meeting.measure_clocks(one.rank for one in firsts if one.rank)
        compared = {0: replace(facts[0], clock=0.0, sees_mark=True if mark else None)}
        for one in firsts[1:]:
            clock, error = clocks[one.rank]
            sees = self.meeting.hear(f"sees/{one.rank}", self.timeout + _MARGIN)
            compared[one.rank] = replace(one, clock=clock, clock_error=error, sees_mark=sees)
        return [compared.get(one.rank, one) for one in facts]

    def _measure(
        self, steps: Steps, device: str, rounds: list[list[Pair]], machines: Sequence[Machine]
    ) -> tuple[list[LinkSpeed], list[Exchange], list[Problem]]:
        links, exchanges, failures = self._gather_measured("links", steps, self._start(device, rounds))
        for attempt in range(_MORE_TRIES):
            doubtful = {(*sorted((link.source, link.to)),) for link in suspects(links, machines)}
            # Whole rounds: a link is slower if other ranks of its machine send at the same time.
            again = (
                [] if failures else [number for number, pairs in enumerate(rounds) if not doubtful.isdisjoint(pairs)]
            )
            self.meeting.tell(f"again/{attempt}", again)
            if not again:
                break
            more, _, failures = self._gather_measured(
                f"more/{attempt}", steps, self._repeat([rounds[i] for i in again])
            )
            best = {(link.source, link.to): link for link in sorted([*links, *more], key=lambda link: link.speed)}
            links = sorted(best.values(), key=lambda link: (link.source, link.to))
        return links, exchanges, failures

    def _gather_measured(
        self, key: str, steps: Steps, own: dict[str, Any]
    ) -> tuple[list[LinkSpeed], list[Exchange], list[Problem]]:
        """The measurements of all ranks, this rank's `own` included."""
        steps.start("waiting for the measurements of other ranks")
        self.meeting.tell(f"{key}/0", own)
        heard, missing = self.meeting.collect(key, self.timeout + _MARGIN, lambda: self.meeting.knows("failed"))
        links = [LinkSpeed(**link) for rank in sorted(heard) for link in heard[rank]["links"]]
        slowest: dict[tuple[int, ...], float] = {}
        for message in heard.values():
            for exchange in message["exchanges"]:
                ranks = tuple(exchange["ranks"])
                slowest[ranks] = min(exchange["speed"], slowest.get(ranks, exchange["speed"]))
        return links, [Exchange(*item) for item in sorted(slowest.items())], _failures(heard, missing)

    # ---- Other ranks ----

    def _follow(self, steps: Steps) -> None:
        wait = 2 * self.timeout + 2 * _MARGIN  # rank 0 may come as late as the timeout allows, and wait as long
        steps.start("waiting for rank 0")
        end = time.monotonic() + wait
        while not (compares := self.meeting.knows("compare")) and not self.meeting.knows("plan"):
            if time.monotonic() > end:
                raise TimeoutError(f"no message of rank 0 for {wait:g} s")
            time.sleep(0.01)
        if compares:
            told = self.meeting.hear("compare", wait)
            if self.launch.rank in told["firsts"]:
                self.meeting.answer_clock(self.now)
                mark = Path(told["mark"])
                self.meeting.tell(f"sees/{self.launch.rank}", mark.exists() if told["mark"] else None)
        plan = self.meeting.hear("plan", wait)
        if plan is None:
            return
        rounds = rounds_of(plan["machines"])
        own = self._start(plan["device"], rounds)
        self.meeting.tell(f"links/{self.launch.rank}", own)
        steps.start("waiting for rank 0 after the measurements")
        for attempt in range(_MORE_TRIES):
            if not (again := self.meeting.hear(f"again/{attempt}", wait)):
                break
            self.meeting.tell(f"more/{attempt}/{self.launch.rank}", self._repeat([rounds[i] for i in again]))

    # ---- All ranks ----

    def _start(self, device: str, rounds: list[list[Pair]]) -> dict[str, Any]:
        """Create the process group, and measure. Returns the message for rank 0."""
        found: dict[str, Any] = {"links": [], "exchanges": []}

        def measure(steps: Steps) -> None:
            own = torch.device("cuda", self.launch.local_rank) if device == "cuda" else torch.device("cpu")
            log = NcclLog() if device == "cuda" else None
            steps.start("creating the process group")
            self._init(own)
            self.links = Links(self.launch.rank, own, self.options.size, steps)
            found["links"] = self.links.measured
            self.links.warm_up()
            self.links.run_rounds(rounds)
            if log is not None:
                found["transports"] = log.transports()
                log.close()
            size = self.launch.world_size
            exchange = self.links.exchange(self.options.ep or size, size, 2 * self.timeout)
            found["exchanges"] = [asdict(exchange)] if exchange is not None else []
            self.links.meet("the end")

        ended = self._watched(measure)
        self.transports = found.get("transports", {})
        return self._message(ended, found["links"], found["exchanges"])

    def _repeat(self, rounds: list[list[Pair]]) -> dict[str, Any]:
        self.links.measured = []

        def measure(steps: Steps) -> None:
            if self.links.device.type == "cuda":
                torch.cuda.set_device(self.links.device)  # each thread has its own choice
            self.links.steps = steps
            self.links.run_rounds(rounds)
            self.links.meet("the end")

        ended = self._watched(measure)
        return self._message(ended, self.links.measured, [])

    def _init(self, device: torch.device) -> None:
        """Create the default process group, unless there is one. torch waits longer than this rank does."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            init_world(device, self.launch, 2 * self.timeout, self.meeting.store_for_group())
            self.created = True

    def _watched(self, measure: Callable[[Steps], None]) -> Ended[None]:
        def stop() -> bool:
            self.steps.start("measuring")  # all measurements together may take long, each of them may not
            return self.meeting.knows("failed")

        ended = run_watched(measure, self.timeout, stop)
        if ended.failure:
            self.stuck = True
            self.meeting.tell("failed", self.launch.rank)
        return ended

    def _message(
        self, ended: Ended[None], links: Sequence[LinkSpeed], exchanges: list[dict[str, Any]]
    ) -> dict[str, Any]:
        failure = f"rank {self.launch.rank} on {self.own.host}: {ended.failure}" if ended.failure else ""
        known = [replace(link, transport=self.transports.get((link.source, link.to), "")) for link in links]
        measured = {"links": [asdict(link) for link in known], "exchanges": exchanges}
        return measured | {"failure": failure, "waited": ended.waited}


def _failures(heard: dict[int, dict[str, Any]], missing: list[int]) -> list[Problem]:
    """What failed while links were measured. Ranks that only waited for others are not named, if others failed."""
    failed = [message for message in heard.values() if message["failure"]]
    real = [message for message in failed if not message["waited"]] or failed
    way_out = "check the network between these ranks: firewall, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
    problems = []
    for message in real:
        where, _, what = message["failure"].partition(": ")
        problems.append(Problem(where, what, way_out))
    if missing:
        what = "no answer while links were measured"
        problems.append(Problem(list_ranks(missing), what, "look for errors on their machines"))
    return problems
