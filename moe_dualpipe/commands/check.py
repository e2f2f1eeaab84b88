"""`moe-dualpipe check parallel`: compare a model in many parallel layouts with one process."""

from functools import partial

from ..tools.checks import check_parallel, check_transformers
from ..training.config import BatchConfig, TrainConfig
from ..training.options import parse_arguments


class CheckParallel:
    """Check that losses, logits and gradients of a model are the same in any parallel layout as in one process.

    Takes the options of train.py, such as --preset small --pp 4 --ep 2 --schedule zbv, and starts --pp x --ep
    processes (--pp 1 by default). Data, optimizer and checkpoints are ignored. `train.py --help` lists the options.

    If the first word is the folder or name of a model of Hugging Face transformers, this model is checked as
    transformers divides it. Then only --seq-len and --seed are used.
    """

    def __init__(self, options: list[str]):
        named = options[:1] and not options[0].startswith("-") and not options[0].endswith(".toml")
        config = parse_arguments(options[1:] if named else options, TrainConfig(batch=BatchConfig(seq_len=16)))
        self.check = partial(check_parallel, config)
        if named:
            self.check = partial(check_transformers, options[0], config.batch.seq_len, config.seed)

    def run(self) -> int:
        """Print the table. Returns the exit code: 1 if a check failed."""
        report = self.check()
        print(report)
        return 0 if report.passed else 1
