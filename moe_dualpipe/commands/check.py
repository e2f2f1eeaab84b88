"""`moe-dualpipe check parallel`: compare a model in many parallel layouts with one process."""

from ..tools.checks import check_parallel
from ..training.config import BatchConfig, TrainConfig
from ..training.options import parse_arguments


class CheckParallel:
    """Check that losses, logits and gradients are the same in any parallel layout. Takes the options of train.py.

    Uses the model, the seed, the sequence length, the micro-batch size and the layout, with --pp x --ep processes
    (--pp 1 by default). Ignores data, optimizer and checkpoints. Raises ValueError for invalid options.
    """

    def __init__(self, options: list[str]):
        self.config = parse_arguments(options, TrainConfig(batch=BatchConfig(seq_len=16)))

    def run(self) -> int:
        """Print the table. Returns the exit code: 1 if a check failed."""
        report = check_parallel(self.config)
        print(report)
        return 0 if report.passed else 1
