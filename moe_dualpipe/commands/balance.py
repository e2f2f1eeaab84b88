"""`moe-dualpipe model balance`: what another placement of the experts would gain."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ..data.stores import is_url
from ..messages import LARGEST, check_range, printable


@dataclass(frozen=True)
class Balance:
    """Place experts by their measured load, with copies of those with the most, and show how even the GPUs become."""

    run_or_file: Positional[Annotated[str, arg(metavar="RUN|FILE", help=(
        "Folder or URL of a run or of a checkpoint, or a JSON file with \"loads\", a list of numbers for each layer."
    ))]]  # fmt: skip
    gpus: int = 8
    """Number of GPUs that share the experts of a layer."""
    slots: int | None = None
    """Experts and copies of a layer, on all GPUs together. None: one more on each GPU than without copies."""
    nodes: int = 1
    """Number of nodes of these GPUs."""
    groups: int = 1
    """Groups of experts, as in the model's expert_groups. A group stays on one node if nodes divides groups."""
    json: bool = False
    """Print JSON instead, with the expert in each slot."""

    def run(self) -> None:
        from ..checkpoint.expert_loads import read_loads
        from ..expert_parallel.placement import in_order, place_experts
        from ..tools.planner.balance_table import balance_report

        for name in ("gpus", "nodes", "groups"):
            check_range(f"--{name}", getattr(self, name), 1, LARGEST)
        layers, loads = read_loads(find_loads(self.run_or_file))
        experts = len(loads[0]) if loads else 0
        slots = self.slots if self.slots is not None else (-(-experts // self.gpus) + 1) * self.gpus
        fit = self.nodes, self.groups
        best = place_experts(loads, slots, self.gpus, *fit)
        if self.json:
            report = {"layers": layers, "gpus": self.gpus, "nodes": self.nodes, "experts": best.experts,
                      "gpu_loads": best.gpu_loads(loads)}  # fmt: skip
            print(json.dumps(report))
            return
        even = experts % self.gpus == 0
        placements = {
            "in order": in_order(len(loads), experts, self.gpus) if even else None,
            "moved": place_experts(loads, experts, self.gpus, *fit) if even else None,
            "moved and copied": best,
        }
        print(balance_report(layers, loads, placements, self.gpus, self.nodes, slots))


def find_loads(run_or_file: str) -> Path:
    """The file with the loads of a run, or the file itself. Raises the errors of `find_checkpoint`."""
    from ..checkpoint import find_checkpoint
    from ..checkpoint.expert_loads import LOADS_FILE

    if not is_url(run_or_file) and not Path(run_or_file).is_dir():
        return Path(run_or_file)
    checkpoint = find_checkpoint(run_or_file)
    if not (file := checkpoint / LOADS_FILE).is_file():
        raise ValueError(f"{printable(checkpoint)} has no {LOADS_FILE}: its model has no experts, or it is older")
    return file
