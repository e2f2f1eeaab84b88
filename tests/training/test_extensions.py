"""Each extension of a step has an effect of its own: without it in `Trainer.extensions`, its law is broken."""

import dataclasses

import torch

from moe_dualpipe.runtime.shared_errors import gather_objects
from tests.support.ranks import run_ranks
from tests.support.runs import SHALLOW, make_trainer, settings
from tests.support.special_experts import RunningExperts, named

RUNNING = dataclasses.replace(SHALLOW, experts=named(RunningExperts), router_bias=True)
SMALL = {"model": RUNNING, "seq_len": 16, "eval_sequences": 1, "steps": 3}
DENSE = "layers.0.attention.qkv.weight"
ALWAYS = ["SkippedSteps", "AveragedBuffers", "ReplicaChecks", "Balancing", "Timings"]


def make_without(rank, config, removed):
    trainer = make_trainer(rank, config)
    names = [type(one).__name__ for one in trainer.extensions]
    trainer.extensions = [one for one in trainer.extensions if type(one).__name__ != removed]
    return trainer, names


def with_nan_loss(trainer, step):
    """Do a step whose loss is not finite. Returns whether it changed a weight of this rank."""
    run = trainer.pipeline.step
    before = {name: t.clone() for name, t in trainer.state().items() if name.startswith("model.") and "_E" not in name}
    trainer.pipeline.step = lambda *batch, **options: [loss * torch.nan for loss in run(*batch, **options)]
    trainer.step(step)
    trainer.optimizer.wait()
    trainer.pipeline.step = run
    state = trainer.state()
    return any(not torch.equal(state[name], weight) for name, weight in before.items() if ".mean" not in name)


def error_of_a_flip(rank, trainer, step):
    """The error of a step before which a weight changes on one of the two ranks that hold it."""
    with torch.no_grad():
        weight = dict(trainer.stages[0].named_parameters())[DENSE]
        weight.view(-1)[0] += rank
    try:
        trainer.step(step)
    except RuntimeError as error:
        return str(error)
    return ""


def laws(rank, config, removed):
    """Which law holds in three steps without the extension `removed`, on this rank."""
    trainer, names = make_without(rank, config, removed)
    record = trainer.step(0).record
    means = {name: t.tolist() for name, t in trainer.buffers.state().items() if ".mean" in name}
    biases = [t for name, t in trainer.buffers.state().items() if name.endswith("bias_E")]
    holds = {
        "Timings": {"seconds", "tokens", "tokens_per_s", "peak_memory_mb", "reduce_seconds"} <= {*record},
        "Balancing": "dead_experts" in record and any(bias.any() for bias in biases),
        "AveragedBuffers": all(other == means for other in gather_objects(means)) and bool(means),
        "SkippedSteps": record.get("skipped") == 0 and not any(gather_objects(with_nan_loss(trainer, 1))),
    }
    holds["ReplicaChecks"] = DENSE in error_of_a_flip(rank, trainer, 2)
    return names, holds


def laws_of_each(rank, config):
    return [laws(rank, config, removed) for removed in [None, *ALWAYS]]


def test_without_an_extension_its_law_is_broken(tmp_path):
    config = settings(tmp_path, **SMALL, check_replicas_every=3)
    for found in run_ranks(2, laws_of_each, config):
        names, all_hold = found[0]
        assert sorted(names) == sorted(ALWAYS) and all_hold == dict.fromkeys(all_hold, True)
        for removed, (_, holds) in zip(ALWAYS, found[1:], strict=True):
            assert not holds[removed], removed
