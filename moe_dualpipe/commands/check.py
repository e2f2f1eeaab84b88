"""`moe-dualpipe check parallel`: compare a model in many parallel layouts with one process."""

from ..tools.checks import check_parallel
from ..training.config import BatchConfig, TrainConfig
from ..training.options import parse_arguments


class CheckParallel:
    """Check that losses, logits and gradients of a model are the same in any parallel layout as in one process.

    Takes the options of train.py, such as --preset small --pp 4 --ep 2 --schedule zbv, and starts --pp x --ep
    processes (--pp 1 by default). Data, optimizer and checkpoints are ignored. `train.py --help` lists the options.
    """

    def __init__(self, options: list[str]):
        self.config = parse_arguments(options, TrainConfig(batch=BatchConfig(seq_len=16)))

    def run(self) -> int:
        """Print the table. Returns the exit code: 1 if a check failed."""
        report = check_parallel(self.config)
        print(report)
        return 0 if report.passed else 1
