"""The command that starts a planned run with this project."""

from ..models import PRESETS
from .workload import Workload


def train_command(load: Workload) -> str:
    """The command that starts this run here, or why this project cannot run it."""
    one = load.division
    missing = [f"{name} {number}" for name, number in (("tp", one.tp), ("cp", one.cp)) if number > 1]
    missing += [load.precision] if load.precision in ("fp8", "mxfp8") else []
    missing += [load.schedule] if load.schedule == "interleaved_1f1b" and one.vpp != 2 else []
    missing += [] if load.shape.name in PRESETS else [f"the model {load.shape.name}, which is not a preset"]
    if missing:
        return f"train.py cannot run it: {', '.join(missing)}"
    nodes, each = max(1, one.gpus // (load.device.domain.gpus or 1)), min(one.gpus, load.device.domain.gpus or 1)
    where = f"--nnodes {nodes} --nproc-per-node {each}" if nodes > 1 else f"--nproc-per-node {each}"
    return (
        f"torchrun {where} train.py --preset {load.shape.name} --pp {one.pp} --ep {one.ep} --schedule {load.schedule} "
        f"--micro-batch-size {load.micro_batch} --micro-batches {load.num_micro_batches} --seq-len {load.seq} "
        f"--recompute {load.recompute}"
    )
