"""Plant one bug at a time, run the tests of its room, and print the bugs that no test noticed.

    make mutants                                       all rooms, about 2 hours on two cores
    python -m tests.mutants --room planner             one room
    python -m tests.mutants --room planner --only 3    its third bug

The exit code is 1 if a bug survived that its table does not call equivalent, or if a room's tests fail without a bug.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from .table import ROOT, Mutant, mutants

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "runs", "__pycache__", ".hypothesis", ".pytest_cache")
PATIENCE_S = 900  # a bug that makes a room's tests hang counts as noticed


def main() -> None:
    table = mutants()
    rooms = sorted({mutant.room for mutant in table})
    parser = argparse.ArgumentParser(description="Plant bugs, and print those that no test notices.")
    parser.add_argument("--room", action="append", choices=rooms, help="plant in this room only; repeatable")
    parser.add_argument("--only", type=int, metavar="N", help="plant the Nth bug of each room only, from 1")
    parser.add_argument("--workers", type=int, default=2, help="bugs planted at the same time (default 2)")
    args = parser.parse_args()
    chosen = []
    for room in args.room or rooms:
        rows = [mutant for mutant in table if mutant.room == room]
        chosen += rows if args.only is None else rows[args.only - 1 : args.only]
    with _copies(args.workers) as copies:
        sound = _sound({mutant.room: mutant for mutant in chosen}.values(), copies)
        survivors = [mutant for mutant, noticed in _plant(chosen, copies) if not noticed]
    equivalent = [mutant for mutant in survivors if mutant.equivalent]
    holes = [mutant for mutant in survivors if not mutant.equivalent]
    print(f"\n{len(chosen)} bugs, {len(chosen) - len(survivors)} noticed, {len(equivalent)} equivalent")
    for mutant in holes:
        print(f"SURVIVED {mutant.file}: {mutant.breaks}\n  - {mutant.old}\n  + {mutant.new}")
    sys.exit(1 if holes or not sound else 0)


@contextmanager
def _copies(number: int) -> Iterator[SimpleQueue[Path]]:
    """A queue of copies of the repository, which share its virtual environment."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for i in range(number):
            copy = Path(folder, str(i), ROOT.name)
            shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
            (copy / ".venv").symlink_to(ROOT / ".venv")
            copies.put(copy)
        yield copies


def _sound(rooms: Iterable[Mutant], copies: SimpleQueue[Path]) -> bool:
    """Whether the tests of all rooms pass without a bug: otherwise they notice nothing."""
    sound = True
    for mutant in rooms:
        copy = copies.get()
        if _tests_fail(mutant, copy):
            print(f"{mutant.room}: tests fail without a bug", flush=True)
            sound = False
        copies.put(copy)
    return sound


def _plant(chosen: list[Mutant], copies: SimpleQueue[Path]) -> Iterator[tuple[Mutant, bool]]:
    def noticed(mutant: Mutant) -> bool:
        copy = copies.get()
        try:
            (copy / mutant.file).write_text(mutant.planted())
            return _tests_fail(mutant, copy)
        finally:
            shutil.copy(ROOT / mutant.file, copy / mutant.file)
            copies.put(copy)

    with ThreadPoolExecutor(copies.qsize()) as pool:
        for number, (mutant, found) in enumerate(zip(chosen, pool.map(noticed, chosen), strict=True), 1):
            said = "noticed" if found else "equivalent" if mutant.equivalent else "SURVIVED"
            print(f"{number}/{len(chosen)} {mutant.room}: {said}: {mutant.file}: {mutant.breaks}", flush=True)
            yield mutant, found


def _tests_fail(mutant: Mutant, copy: Path) -> bool:
    """Whether the room's tests fail in `copy`: exit code 1 or 2 (a module does not import), a crash or a time-out."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--durations=0", *mutant.tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, cwd=copy, env=environment, **pipes) as run:
        try:
            output, _ = run.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # with the ranks that its tests have started
            return True
    if run.returncode > 2:
        raise RuntimeError(f"pytest ended with {run.returncode}: {output[-2000:]}")
    return run.returncode != 0


if __name__ == "__main__":
    main()
