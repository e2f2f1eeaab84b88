"""Run the check on this rank. Rank 0 decides, and has the report; the others follow its messages in the store.

1. Each rank gathers its facts and tells them to rank 0, which finds out whose machine is missing.
2. Unless a problem stops it, all ranks compare clocks and the output folder with those of rank 0, create a process
   group, and measure their links.
3. Rank 0 tells the exit code.

Every step ends in time, on every rank: see bounded_calls.py. The rendezvous store needs one TCP connection from each
rank to one machine, so ranks can tell facts and failures there even if they cannot reach each other.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...messages import list_ranks
from ...runtime.groups import init_world
from ...runtime.launch import Launch
from .bounded_calls import Steps, run_watched
from .facts import Facts, gather_facts, machines_of, remove_mark
from .links import WAITING, Links, LinkSpeed, rounds_of
from .verdicts import Problem, Report, device_of, find_link_problems, find_problems

_MARGIN = 5.0
"""Seconds that a message may take, beyond what its sender may."""
_POLL = 0.01


@dataclass(frozen=True, slots=True)
class Options:
    """out: output folder. size: bytes of a message. timeout: seconds. min_free: bytes. device: auto, cpu or cuda."""

    out: Path = Path("runs")
    size: int = 16 << 20
    timeout: float = 60.0
    min_free: int = 10 * 10**9
    device: str = "auto"


def check_cluster(options: Options, launch: Launch | None = None) -> tuple[int, Report | None]:
    """Check this machine or, with several processes, all of them. Collective.

    Returns the exit code, and on rank 0 the report. Threads may be left that keep the process from exiting: end it with
    `end_process`.
    launch: the place of this process; None: that of the environment. Raises ConnectionError if rank 0 does not answer.
    """
    launch = launch or Launch.from_environment()
    own, failure = run_watched(lambda steps: gather_facts(launch, options.out, steps), options.timeout)
    if failure:
        own = Facts(
            launch.rank, socket.gethostname(), local_rank=launch.local_rank, local_size=launch.local_world_size,
            failed=failure,
        )  # fmt: skip
    try:
        if launch.world_size > 1:
            return _Rank(options, launch, own).run()
        problems = find_problems([own], 1, options.min_free, options.device)
        report = Report(
            1, device_of([own], options.device), [own], problems,
            note="One process: links between ranks were not measured. torchrun starts more.",
        )  # fmt: skip
        return int(not report.passed), report
    finally:
        remove_mark(own)


class _Rank:
    """One of several ranks. All messages and their order are here."""

    store: dist.Store

    def __init__(self, options: Options, launch: Launch, own: Facts):
        self.options, self.launch, self.own = options, launch, own
        self.timeout, self.rank, self.size = options.timeout, launch.rank, launch.world_size

    def run(self) -> tuple[int, Report | None]:
        self._watched(self._connect)
        # Rank 0 may come as late as the timeout allows, and wait as long.
        report, plan = self._watched(self._lead if self.rank == 0 else self._follow)
        if plan:
            now, found = time.time(), dict[tuple[int, int], float]()
            compared = {"clock": now - plan["time"], "sees_mark": Path(plan["mark"]).exists() if plan["mark"] else None}
            _, failure = run_watched(lambda steps: self._measure(plan, found, steps), self.timeout)
            failure = failure and f"rank {self.rank} on {self.own.host}: {failure}"
            links = [asdict(LinkSpeed(source, to, speed)) for (source, to), speed in found.items()]
            message = {"links": links, "failure": failure, "compared": compared}
            self._watched(lambda _: self._tell(f"links/{self.rank}", message))
        return self._watched(lambda steps: self._end(report, bool(plan), steps))

    def _watched(self, function: Callable[[Steps], Any]) -> Any:
        value, failure = run_watched(function, 3 * self.timeout + 3 * _MARGIN)
        if failure:
            raise ConnectionError(f"rank {self.rank} on {self.own.host}: {failure}")
        return value

    # ---- messages: JSON, each with a key that no other message has ----

    def _connect(self, steps: Steps) -> None:
        steps.start("connecting to the rendezvous store")
        self.store = self._open_store(self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
        self._tell(f"facts/{self.rank}", asdict(self.own))

    def _open_store(self, opens: bool) -> dist.Store:
        """The store at MASTER_ADDR:MASTER_PORT. opens: create it, because torchrun has not."""
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdecimal():
            raise ValueError("MASTER_ADDR and MASTER_PORT must be set, as torchrun does: they say where ranks meet")
        wait = timedelta(seconds=self.timeout)
        store = dist.TCPStore(host, int(port), None, opens, timeout=wait, wait_for_workers=False)
        return dist.PrefixStore(f"check cluster/{self.launch.restarts}", store)

    def _tell(self, key: str, message: Any) -> None:
        self.store.set(key, json.dumps(message))

    def _hear(self, key: str, seconds: float) -> Any:
        """The message of `key`. Raises TimeoutError if there is none after `seconds`."""
        end = time.monotonic() + seconds
        while not self.store.check([key]):  # a wait in C++ could not be interrupted
            if time.monotonic() > end:
                raise TimeoutError(f"no message {key!r} for {seconds:g} s")
            time.sleep(_POLL)
        return json.loads(self.store.get(key))

    def _collect(self, key: str, seconds: float) -> tuple[dict[int, Any], list[int]]:
        """The messages "key/rank" of all ranks, by rank, and the ranks without one after `seconds`."""
        heard: dict[int, Any] = {}
        end = time.monotonic() + seconds
        for rank in range(self.size):
            try:
                heard[rank] = self._hear(f"{key}/{rank}", end - time.monotonic())
            except TimeoutError:
                continue
        return heard, [rank for rank in range(self.size) if rank not in heard]

    # ---- rank 0 ----

    def _lead(self, steps: Steps) -> tuple[Report, dict[str, Any]]:
        steps.start("meeting the other ranks")
        heard, missing = self._collect("facts", self.timeout)
        facts = [Facts.from_json(heard[rank]) for rank in sorted(heard)]
        problems = [self._missing(facts, missing)] if missing else []
        problems += find_problems(facts, self.size, self.options.min_free, self.options.device)
        device, plan = device_of(facts, self.options.device), {}
        if not any(problem.stops for problem in problems):
            homes = [machine.numbers for machine in machines_of(facts)]
            plan = {"device": device, "machines": homes, "mark": self.own.mark, "time": time.time()}
        self._tell("plan", plan)
        note = "" if plan else "Links were not measured: first solve the problems below."
        return Report(self.size, device, facts, problems, note=note), plan

    def _missing(self, facts: Sequence[Facts], missing: list[int]) -> Problem:
        here = ", ".join(machine.name for machine in machines_of(facts))
        waited = f"waited {self.timeout:g} s for {len(missing)} of {self.size} ranks: {list_ranks(missing[:8])}"
        way_out = "start them, and look for a firewall or errors on their machines"
        return Problem("rendezvous", f"{waited} (ranks of {here} are here)", way_out, True)

    def _judge(self, report: Report) -> Report:
        """The report with what all ranks measured."""
        heard, missing = self._collect("links", self.timeout + _MARGIN)
        facts = [replace(one, **heard[one.rank]["compared"]) if one.rank in heard else one for one in report.facts]
        links = [LinkSpeed(**link) for rank in sorted(heard) for link in heard[rank]["links"]]
        problems = find_problems(facts, self.size, self.options.min_free, self.options.device)
        failed = [message for message in heard.values() if message["failure"]]
        # Ranks that only waited for others are not named, if others failed.
        for message in [message for message in failed if WAITING not in message["failure"]] or failed:
            where, _, what = message["failure"].partition(": ")
            way_out = "check the network between these ranks: firewall, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
            problems.append(Problem(where, what, way_out))
        if missing:
            what = "no answer while links were measured"
            problems.append(Problem(list_ranks(missing), what, "look for errors on their machines"))
        problems += find_link_problems(links, machines_of(facts))
        return replace(report, facts=facts, problems=problems, links=links)

    # ---- all ranks ----

    def _follow(self, steps: Steps) -> tuple[None, dict[str, Any]]:
        steps.start("waiting for rank 0")
        return None, self._hear("plan", 2 * self.timeout + 2 * _MARGIN)

    def _measure(self, plan: dict[str, Any], found: dict[tuple[int, int], float], steps: Steps) -> None:
        """Create the process group, and measure. found: gets the speeds, including those of links before one that
        fails."""
        cuda = plan["device"] == "cuda"
        device = torch.device("cuda", self.launch.local_rank) if cuda else torch.device("cpu")
        steps.start("creating the process group")
        if cuda:
            torch.cuda.set_device(device)
        # torch waits longer than this rank does. The store has a connection of its own, so that messages need not wait.
        init_world(device, self.launch, 2 * self.timeout, dist.PrefixStore("group", self._open_store(False)))
        links = Links(self.rank, device, self.options.size, steps, found)
        links.warm_up()
        links.run_rounds(rounds_of(plan["machines"]))
        links.meet("the end")
        dist.destroy_process_group()

    def _end(self, report: Report | None, measured: bool, steps: Steps) -> tuple[int, Report | None]:
        steps.start("waiting for the measurements of other ranks")
        if report is not None:
            report = self._judge(report) if measured else report
            self._tell("code", 0 if report.passed else 1)
        code = self._hear("code", 2 * self.timeout + 2 * _MARGIN)
        self._tell(f"left/{self.rank}", True)
        if report is not None:  # the store may be in this process
            self._collect("left", _MARGIN if len(report.facts) == self.size else 1.0)
        return code, report
