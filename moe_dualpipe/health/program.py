"""How this process was started, for messages and for commands to type again.

Training starts as train.py, as another script that calls its `main`, as `moe-dualpipe train`, or as
`python -m moe_dualpipe.cli train`. Each of them runs alone or under torchrun.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

CONSOLE_SCRIPT = "moe-dualpipe"
MODULE = "moe_dualpipe.cli"
_STARTS = "--no-python", "--no_python", "-m", "--module"


def program_name() -> str:
    """The program that trains, as messages name it."""
    return f"{CONSOLE_SCRIPT} train" if _is_module() or _is_console_script() else "train.py"


def training_command(processes: int | None) -> list[str]:
    """The words of a command that starts training in the way in which this process was started.

    processes: the number that torchrun starts on this machine. None: without torchrun. The options of torchrun are
    repeated, if they can be seen: those of this machine.
    """
    launcher = []
    if processes:
        options = launcher_options(_parent_command()) or ["--nproc-per-node", str(processes)]
        launcher = [_executable("torchrun"), *options]
    if _is_module():
        return [*(launcher or [_executable("python")]), "-m", MODULE, "train"]
    if _is_console_script():
        return [*launcher, *(["--no-python"] if launcher else []), _executable(CONSOLE_SCRIPT), "train"]
    return [*(launcher or [_executable("python")]), os.path.relpath(sys.argv[0])]


def launcher_options(words: Sequence[str]) -> list[str] | None:
    """The options of torchrun, such as --nnodes, in the words of the command that started it; None for another program.

    Without those that say how the script starts (--no-python, -m).
    """
    names = [i for i, word in enumerate(words[:4]) if Path(word).name == "torchrun" or word == "torch.distributed.run"]
    if not names:
        return None
    from torch.distributed.run import get_args_parser  # not at the top: `--help` starts faster without torch

    given = words[names[0] + 1 :]
    parsed, _ = get_args_parser().parse_known_args(given)
    return [word for word in given[: len(given) - len(parsed.training_script_args) - 1] if word not in _STARTS]


def _parent_command() -> list[str]:
    """The words of the command that started this process's parent. Known only on Linux."""
    try:
        return Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
    except (OSError, UnicodeDecodeError):
        return []


def _is_module() -> bool:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == MODULE


def _is_console_script() -> bool:
    return Path(sys.argv[0]).name == CONSOLE_SCRIPT


def _executable(name: str) -> str:
    """`name` if the shell finds the program next to this interpreter, otherwise its path."""
    path = Path(sys.executable).with_name(name)
    if not path.exists() or shutil.which(name) == str(path):
        return name
    return os.path.relpath(path)
