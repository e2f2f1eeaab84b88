"""The console script `moe-dualpipe`: train, show schedules, measure the overlap, and use trained models.

    moe-dualpipe train --preset tiny
    moe-dualpipe schedule show dualpipe --ranks 8 --micro-batches 20 --out dualpipe.svg
    moe-dualpipe schedule compare --stages 8 --micro-batches 32 --cost.F 2 --cost.B 5 --cost.W 2 --cost.FB 6
    moe-dualpipe schedule check order.csv
    moe-dualpipe profile analyze trace.json.gz --phases --out lanes.png
    moe-dualpipe profile run --mode train --preset tiny
    moe-dualpipe plot runs/tiny
    moe-dualpipe data prepare notes.jsonl --out corpus
    moe-dualpipe generate runs/tiny --prompt "def "
    moe-dualpipe eval runs/tiny --data notes.md
    moe-dualpipe model show deepseek-v3 --pp 16 --ep 64

Invalid options print one line and exit with code 2. An invalid schedule, an error in your own layer and a full disk
exit with code 1.
"""

import sys
from collections.abc import Sequence

from . import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, or raises SystemExit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["train"]:
        from .commands.train import main as train  # handles signals before it imports what takes time

        train(arguments[1:])
        return 0
    if arguments[:1] == ["--version"]:
        print(f"moe-dualpipe {__version__}")
        return 0
    from .commands.main import run_command

    return run_command(arguments)


if __name__ == "__main__":
    sys.exit(main())
