"""How ranks end when torchrun is to bring the machines of a run together again.

torchrun starts the ranks of a machine again if one of them fails, or if another machine waits to join. If all ranks of
a machine end with code 0, it takes the run as complete, and ends it for all machines. So a rank that stops because
another machine leaves must not end with code 0.
"""

import os
import signal
import time
from typing import NoReturn

from ..health.program import program_name
from ..health.report import report_error
from ..health.signals import Stop
from ..runtime.launch import Launch
from ..runtime.versions import OtherVersionsError

_POLL = 0.05
SIGNAL_SECONDS = 10.0
"""How long a stopped rank waits for the signal of its own launcher. torchrun looks for other machines every 0.1 s."""


def end_after_stop(stop: Stop, rank: int, seconds: float = SIGNAL_SECONDS) -> None:
    """End a rank of a run on several machines that was stopped by a signal to any rank.

    If its launcher sends a signal too, all machines stop, or another one joins: returns. Otherwise a machine leaves,
    and the others go on: exits with code 1, so that torchrun starts this rank again.
    """
    stop.announce = False
    end = time.monotonic() + seconds
    while not stop.requested:
        if time.monotonic() > end:
            why = "another machine is leaving; torchrun will restart the remaining ranks"
            report_error(f"{program_name()}: rank {rank} exits: {why}\n")
            raise SystemExit(1)
        time.sleep(_POLL)


def end_without_layout(error: ValueError, launch: Launch, seconds: float) -> NoReturn:
    """End a run that cannot go on with this number of processes, unless more come: waits, then exits with code 2.

    torchrun ends the process if a machine joins. If it ended at once, torchrun would use up its restarts.
    """
    wait = seconds if launch.world_size > launch.local_world_size else 0
    if launch.rank == 0:
        waits = f"; waiting {wait:g} s for other machines" if wait else ""
        report_error(f"{program_name()}: error: {error}{waits}\n")
    time.sleep(wait)
    raise SystemExit(2)


def end_with_other_versions(error: OtherVersionsError, machine: str, launch: Launch) -> NoReturn:
    """End a rank because machines have different versions. After a restart, the odd ones leave, and the others go on.

    torchrun on an odd machine gets a signal: if it ended by itself, it would end the run of all machines.
    """
    if launch.local_rank == 0:
        report_error(f"{program_name()}: error: {error}\n")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise SystemExit(2)
    if machine in error.machines and launch.local_rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    raise SystemExit(1)
