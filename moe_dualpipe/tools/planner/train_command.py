"""The command that starts a planned run with this project."""

from ...models import PRESETS
from ...schedule.build import check_numbers
from .workload import PAIRED, Workload


def train_command(load: Workload) -> str:
    """The command that starts this run here, or why this project cannot run it."""
    if lacks := missing(load):
        return f"train.py cannot run it: {', '.join(lacks)}"
    one = load.layout
    # Machines have up to 8 GPUs, or 4 where a domain spans machines.
    most = min(8 if (load.device.domain.gpus or 1) <= 8 else 4, load.device.domain.gpus or 1)
    each = next(number for number in range(most, 0, -1) if one.num_ranks % number == 0)
    where = f"--nnodes {one.num_ranks // each} " * (one.num_ranks > each) + f"--nproc-per-node {each}"
    words = [
        f"torchrun {where} train.py --preset {load.shape.name} --pp {one.pp} --ep {one.ep} --schedule {load.schedule}",
        f"--batch-size {load.global_batch} --micro-batch-size {load.micro_batch} --seq-len {load.seq}",
        f"--recompute {load.recompute}",
    ]
    others = {
        f"parallel.num_chunks={one.chunks}": one.chunks is not None,
        f"parallel.layers={','.join(map(str, load.layers))}": bool(load.layers),
        f"model.mtp_layers={load.shape.mtp}": load.shape.mtp != PRESETS[load.shape.name].mtp_layers,
        "parallel.overlap=false": load.overlap is False and load.schedule in PAIRED,
        "parallel.zero=false": not load.zero,
        f"compute.fp8={load.fp8}": load.fp8 != "off",
        "compute.fp8_recipe=mxfp8": load.fp8 != "off" and load.expert_precision == "mxfp8",
    }
    changed = [word for word, differs in others.items() if differs]
    return " ".join(word for word in [*words, *["--set"] * bool(changed), *changed] if word)


def missing(load: Workload) -> list[str]:
    """What train.py lacks for this run. Empty if it can run it."""
    one = load.layout
    found = [f"{name} {number}" for name, number in (("tp", one.tp), ("cp", one.cp)) if number > 1]
    found += [load.precision] if load.precision in ("fp8", "mxfp8") else []
    found += [f"overlap in {load.schedule}"] if load.overlap and one.ep > 1 and load.schedule not in PAIRED else []
    found += [] if load.shape.name in PRESETS else [f"{load.shape.name} is not a preset"]
    try:
        check_numbers(load.schedule, one.pp, load.num_micro_batches, one.chunks)
    except ValueError as error:
        found.append(str(error))
    return found
