"""A disk that hangs while a checkpoint is written or read is named with its rank; a slow one is not."""

from moe_dualpipe.training.loop import train_loop
from tests.support.ranks import run_ranks
from tests.support.runs import make_trainer, settings


def count_operations(rank, config):
    trainer = make_trainer(rank, config)
    train_loop(trainer)
    return trainer.progress.save.count, trainer.progress.save.operation


def test_the_saves_of_a_run_are_watched(tmp_path):
    config = settings(tmp_path / "run", steps=2, save_every=1, seq_len=16, eval_sequences=1)
    for count, operation in run_ranks(2, count_operations, config):
        assert count > 10 and operation == ""
