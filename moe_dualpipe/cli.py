"""The console script `moe-dualpipe`: train, show schedules, measure the overlap, and use trained models.

    moe-dualpipe train --preset tiny
    moe-dualpipe schedule show dualpipe --pp 8 --micro-batches 20 --out dualpipe.svg
    moe-dualpipe schedule compare --stages 8 --micro-batches 32 --cost.F 2 --cost.B 5 --cost.W 2 --cost.FB 6
    moe-dualpipe schedule check order.csv
    moe-dualpipe profile analyze trace.json.gz --phases --out lanes.png
    moe-dualpipe profile run --mode train --preset tiny
    moe-dualpipe data prepare notes.jsonl --out corpus
    moe-dualpipe generate runs/tiny --prompt "def "
    moe-dualpipe eval runs/tiny --data notes.md
    moe-dualpipe model show deepseek-v3

Only the module of the chosen command is imported: importing torch takes seconds. Invalid options print one line and
exit with code 2. An invalid schedule, an error in your own layer and a full disk exit with code 1.
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from . import __version__
from .command_line import command_help, read_options
from .errors import error_text, user_error
from .messages import describe, unknown_name
from .schedule import ScheduleError

COMMANDS = {
    "train": ("train:main", "Train a Mixture-of-Experts transformer, as train.py does"),
    "schedule show": ("schedule:ShowSchedule", "Show the timeline of a schedule, or save it to a file"),
    "schedule compare": ("schedule:CompareSchedules", "Compare all schedules for the same model"),
    "schedule fill": ("schedule:FillSchedule", "Move weight gradients to where ranks wait, for measured costs"),
    "schedule check": ("schedule:CheckSchedule", "Check that no rank of a schedule can wait forever"),
    "profile analyze": ("profile:ProfileAnalyze", "Analyze traces: how much communication was hidden"),
    "profile compare": ("profile:ProfileCompare", "Compare two recordings"),
    "profile run": ("profile_run:ProfileRun", "Measure the overlap on this machine"),
    "data prepare": ("data:PrepareData", "Encode text into files of token ids"),
    "data check": ("data:CheckData", "Check files of token ids"),
    "generate": ("generate:Generate", "Continue a prompt with the model of a run"),
    "eval": ("eval:Eval", "Evaluate a model on text or tasks"),
    "export": ("export:Export", "Write the weights of a run in Hugging Face's format"),
    "model list": ("plan:ListModels", "List the named models and their sizes"),
    "model show": ("plan:ShowModel", "Show the parameters and FLOPs of a model"),
    "plan estimate": ("plan:EstimateCommand", "Predict step time, memory and cost of a run"),
    "plan search": ("plan:SearchCommand", "Find the layout and the schedule with the shortest step"),
    "check parallel": ("check:CheckParallel", "Compare parallel runs with one process"),
    "check cluster": ("check_cluster:CheckCluster", "Check the machines of a run before it starts"),
    "check experts": ("check:CheckExperts", "Check your own expert layer"),
    "check router": ("check:CheckRouter", "Check your own router"),
    "check attention": ("check:CheckAttention", "Check your own attention"),
    "check block": ("check:CheckBlock", "Check your own transformer block"),
}
"""The class of each command, in commands/, and its line in the help."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, or raises SystemExit."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - closed, as by `>&-`
    if words[:1] == ["train"]:
        from .commands.train import main as train  # handles signals before it imports what takes time

        train(words[1:])
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # generated text may have characters that a terminal lacks
    command: Any = None
    try:
        try:
            command = _parse(words)
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a command may clean up
            return (command.run() if command else 0) or 0
        finally:  # also after --help, which exits
            _flush_output()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _fail(error, command)


def _parse(words: list[str]) -> Any:
    """The chosen command with its options; None after the version or an overview. Raises ValueError."""
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
    if name is not None:
        module, attribute = COMMANDS[name][0].split(":")
        kind: Any = getattr(import_module(f".commands.{module}", __package__), attribute)
        options = words[len(name.split()) :]
        if {"-h", "--help"} & {*options}:
            print(command_help(f"moe-dualpipe {name}", kind))
            raise SystemExit(0)
        if not hasattr(kind, "__dataclass_fields__"):  # it parses its options
            return kind(options)
        return read_options(kind, options)
    group = [word for word in words[:1] if any(name.startswith(f"{word} ") for name in COMMANDS)]
    listed = {name: text for name, (_, text) in COMMANDS.items() if name.split()[: len(group)] == group}
    given = words[len(group) :]
    if given == ["--version"]:
        print(f"moe-dualpipe {__version__}")
    elif given[:1] in (["--help"], ["-h"]):
        print(f"usage: {' '.join(['moe-dualpipe', *group, 'COMMAND'])} [OPTIONS]\n")
        print(*(f"  {name:<18}{text}" for name, text in listed.items()), sep="\n")
        print("\nmoe-dualpipe COMMAND --help lists the options of a command.")
    else:
        names = [*dict.fromkeys(name.split()[len(group)] for name in listed)]
        if not given:
            raise ValueError(f"missing command; choose from: {', '.join(names)}")
        whole = {
            word: name for name in listed for word in (name.split()[-1], name.replace(" ", "-"), name.replace(" ", ""))
        }
        raise unknown_name(
            "command",
            given[0],
            names,
            {**whole, "help": "--help", "version": "--version", "plot": "train --set metrics.tensorboard=true"}
            if not group
            else None,
        )
    return None


def _fail(error: Exception, command: Any) -> int:
    """Print an error, and return the exit code. Errors of this package other than invalid options are raised.

    command: what was run; None if the arguments were invalid.
    """
    if isinstance(error, ScheduleError):
        print(error, file=sys.stderr)
        return 1
    in_layer = command is not None and user_error(error) is not None
    if not in_layer and not isinstance(error, ValueError | OSError | ImportError | OverflowError):
        raise error
    if os.environ.get("RANK", "0") == "0":  # print once, not on every process of torchrun
        # The cause of an invalid option is an error in a user's layer.
        full_traceback = getattr(command, "traceback", False) and (in_layer or error.__cause__ is not None)
        line = f"moe-dualpipe: error: {describe(error)}\n"
        sys.stderr.write(error_text(error, "moe-dualpipe", full_traceback) if in_layer or full_traceback else line)
    return 1 if in_layer or (isinstance(error, OSError) and error.errno in DISK_ERRORS) else 2


def _flush_output() -> None:
    """Raises OSError if that fails. The output is then discarded: Python would flush it again at exit, and fail."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error.filename = "standard output"
        raise


if __name__ == "__main__":
    sys.exit(main())
