"""How this process was started, for messages and for commands to type again.

Training starts as train.py, as another script that calls its `main`, or as `moe-dualpipe train`, whose modules are
cli.py and __main__.py. Each of them runs alone or under torchrun.
"""

import os
import shutil
import sys
from pathlib import Path

CONSOLE_SCRIPT = "moe-dualpipe"


def program_name() -> str:
    """The program that trains, or another command, as messages name it."""
    if not _is_console_script():
        return "train.py"
    return f"{CONSOLE_SCRIPT} train" if sys.argv[1:2] == ["train"] else CONSOLE_SCRIPT


def training_command(processes: int | None) -> list[str]:
    """The words of a command that starts training in the way in which this process was started.

    processes: the number that torchrun starts on each machine. None: without torchrun.
    """
    launcher = []
    if processes:
        machines = os.environ.get("GROUP_WORLD_SIZE", "1")
        several = ["--nnodes", machines] if machines != "1" else []
        launcher = [_executable("torchrun"), *several, "--nproc-per-node", str(processes)]
    if _is_console_script():
        return [*launcher, *(["--no-python"] if launcher else []), _executable(CONSOLE_SCRIPT), "train"]
    return [*(launcher or [_executable("python")]), os.path.relpath(sys.argv[0])]


def _is_console_script() -> bool:
    path = Path(sys.argv[0])
    return path.name in (CONSOLE_SCRIPT, "cli.py") or path.parts[-2:] == ("moe_dualpipe", "__main__.py")


def _executable(name: str) -> str:
    """`name` if the shell finds the program next to this interpreter, otherwise its path."""
    path = Path(sys.executable).with_name(name)
    if not path.exists() or shutil.which(name) == str(path):
        return name
    return os.path.relpath(path)
