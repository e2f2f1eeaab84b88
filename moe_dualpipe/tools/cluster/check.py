"""Run the check on this rank. Rank 0 decides, and has the report; the others follow its messages in the store.

1. Each rank gathers its facts and tells them to rank 0, which finds out whose machine is missing.
2. Unless a problem stops it, all ranks compare clocks and the output folder with those of rank 0, create a process
   group, and measure their links.
3. Rank 0 tells the exit code.

Every step ends in time, on every rank: see bounded_calls.py.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...messages import list_ranks
from ...runtime.groups import init_world
from ...runtime.launch import Launch
from .bounded_calls import Steps, run_watched
from .facts import Facts, machines_of
from .links import Links, LinkSpeed, start_nccl_log, uses_sockets
from .probes import gather_facts, remove_mark
from .rendezvous import Meeting
from .report import Report
from .rounds import rounds_of
from .verdicts import Problem, device_of, find_link_problems, find_problems

_MARGIN = 5.0
"""Seconds that a message may take, beyond what its sender may."""
_NOT_MEASURED = "Links were not measured: first solve the problems below."


@dataclass(frozen=True, slots=True)
class Options:
    """out: output folder. size: bytes of a message. timeout: seconds. min_free: bytes. device: auto, cpu or cuda."""

    out: Path = Path("runs")
    size: int = 16 << 20
    timeout: float = 60.0
    min_free: int = 10 * 10**9
    device: str = "auto"


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
    Raises ConnectionError if rank 0 does not answer.
    """
    launch = launch or Launch.from_environment()
    own = _gather_own(options, launch, gather)
    if launch.world_size == 1 or own.port is not None:
        return _check_alone(options, launch, own)
    rank = _Rank(options, launch, own, now)
    # The rendezvous store may freeze. Each of its steps takes at most a few timeouts, and says what it waited for.
    ended = run_watched(lambda steps: rank.run(steps), 4 * options.timeout + 6 * _MARGIN)
    remove_mark(own)
    if ended.value is None:
        raise ConnectionError(f"rank {launch.rank} on {own.host}: {ended.failure}")
    return ended.value


def _gather_own(options: Options, launch: Launch, gather: Gather) -> Facts:
    ended = run_watched(lambda steps: gather(launch, options.out, steps), options.timeout)
    if ended.value is not None:
        return ended.value
    return Facts(launch.rank, socket.gethostname(), local_rank=launch.local_rank, local_size=launch.local_world_size,
                 failed=ended.failure)  # fmt: skip


def _check_alone(options: Options, launch: Launch, own: Facts) -> Outcome:
    """Check only this machine: there are no others, or they cannot be reached."""
    remove_mark(own)
    problems, note = find_problems([own], launch.world_size, options.min_free, options.device), _NOT_MEASURED
    if launch.world_size == 1:
        note = "One process: links between ranks were not measured. torchrun starts more."
    report = Report(launch.world_size, device_of([own], options.device), [own], problems, note=note)
    return Outcome(0 if report.passed else 1, report, stuck=bool(own.failed))


class _Rank:
    """One of several ranks. All messages and their order are here."""

    meeting: Meeting

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
        problems += find_problems(facts, self.launch.world_size, self.options.min_free, self.options.device)
        device = device_of(facts, self.options.device)
        report = Report(self.launch.world_size, device, facts, problems)
        if any(problem.stops for problem in problems):
            self.meeting.tell("plan", None)
            return replace(report, note=_NOT_MEASURED)
        homes = [machine.numbers for machine in machines_of(facts)]
        plan = {"device": device, "machines": homes, "mark": self.own.mark, "time": self.now()}
        self.meeting.tell("plan", plan)
        self.meeting.tell("links/0", self._measure(plan, self.now()))
        steps.start("waiting for the measurements of other ranks")
        heard, missing = self.meeting.collect("links", self.timeout + _MARGIN, lambda: self.meeting.knows("failed"))
        facts = [replace(one, **heard[one.rank]["compared"]) if one.rank in heard else one for one in facts]
        links = [LinkSpeed(**link) for rank in sorted(heard) for link in heard[rank]["links"]]
        sockets = [rank for rank, message in heard.items() if message["sockets"]]
        problems = find_problems(facts, self.launch.world_size, self.options.min_free, self.options.device)
        problems += [*_failures(heard, missing), *find_link_problems(links, machines_of(facts), sockets)]
        return replace(report, facts=facts, problems=problems, links=links)

    def _missing(self, facts: Sequence[Facts], missing: list[int]) -> Problem:
        here = ", ".join(machine.name for machine in machines_of(facts))
        who = list_ranks(missing) if len(missing) < 9 else f"{list_ranks(missing[:8])} ..."
        waited = f"waited {self.timeout:g} s for {len(missing)} of {self.launch.world_size} ranks: {who}"
        way_out = "start them, and look for a firewall or errors on their machines"
        return Problem("rendezvous", f"{waited} (ranks of {here} are here)", way_out, True)

    # ---- All ranks ----

    def _follow(self, steps: Steps) -> None:
        wait = 2 * self.timeout + 2 * _MARGIN  # rank 0 may come as late as the timeout allows, and wait as long
        steps.start("waiting for rank 0")
        plan = self.meeting.hear("plan", wait)
        if plan is not None:
            self.meeting.tell(f"links/{self.launch.rank}", self._measure(plan, self.now()))

    def _measure(self, plan: dict[str, Any], now: float) -> dict[str, Any]:
        """Compare this machine with rank 0's, create the process group, and measure. Returns the message for rank 0."""
        mark = plan["mark"]
        compared = {"clock": now - plan["time"], "sees_mark": Path(mark).exists() if mark else None}
        found: dict[str, Any] = {"links": {}, "sockets": False}

        def measure(steps: Steps) -> None:
            cuda = plan["device"] == "cuda"
            own = torch.device("cuda", self.launch.local_rank) if cuda else torch.device("cpu")
            log = start_nccl_log() if cuda else None
            steps.start("creating the process group")
            self._init(own)
            links = Links(self.launch.rank, own, self.options.size, steps)
            found["links"] = links.measured
            links.warm_up()
            links.run_rounds(rounds_of(plan["machines"]))
            found["sockets"] = uses_sockets(log)
            links.meet("the end")

        def stop() -> bool:
            self.steps.start("measuring")  # all measurements together may take long, each of them may not
            return self.meeting.knows("failed")

        ended = run_watched(measure, self.timeout, stop)
        if ended.failure:
            self.stuck = True
            self.meeting.tell("failed", self.launch.rank)
        failure = f"rank {self.launch.rank} on {self.own.host}: {ended.failure}" if ended.failure else ""
        links = [asdict(LinkSpeed(source, to, speed)) for (source, to), speed in found["links"].items()]
        return found | {"links": links, "failure": failure, "waited": ended.waited, "compared": compared}

    def _init(self, device: torch.device) -> None:
        """Create the default process group, unless there is one. torch waits longer than this rank does."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            init_world(device, self.launch, 2 * self.timeout, self.meeting.store_for_group())
            self.created = True


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
