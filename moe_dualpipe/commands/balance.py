"""`moe-dualpipe model balance`: what another placement of the experts would gain."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from ..checkpoint.expert_loads import find_loads, read_loads
from ..expert_parallel.placement import in_order, place_experts
from ..tools.planner.balance_table import balance_report
from .options import JsonOption, check_ranges


@dataclass(frozen=True)
class Balance(JsonOption):
    """Place experts by their measured load, with copies of those with the most, and show how even the GPUs become.

    With --json, print the expert in each slot.
    """

    run_or_file: Positional[Annotated[str, arg(metavar="RUN|FILE")]]
    """Folder or URL of a run or of a checkpoint, or a JSON file with "loads", a list of numbers for each layer."""
    gpus: int = 8
    """Number of GPUs that share the experts of a layer."""
    slots: int | None = None
    """Experts and copies of a layer, on all GPUs together. None: one more on each GPU than without copies."""
    nodes: int = 1
    """Number of nodes of these GPUs."""
    groups: int = 1
    """Groups of experts, as in the model's expert_groups. A group stays on one node if nodes divides groups."""

    def run(self) -> None:
        check_ranges(self, 1, "gpus", "nodes", "groups")
        layers, loads = read_loads(find_loads(self.run_or_file))
        experts = len(loads[0]) if loads else 0
        slots = self.slots if self.slots is not None else (-(-experts // self.gpus) + 1) * self.gpus
        fit = self.nodes, self.groups
        best = place_experts(loads, slots, self.gpus, *fit)
        even = experts % self.gpus == 0 and not self.json
        placements = {
            "in order": in_order(len(loads), experts, self.gpus) if even else None,
            "moved": place_experts(loads, experts, self.gpus, *fit) if even else None,
            "moved and copied": best,
        }
        report = {"layers": layers, "gpus": self.gpus, "nodes": self.nodes, "experts": best.experts,
                  "gpu_loads": best.gpu_loads(loads)}  # fmt: skip
        self.show(report, balance_report(layers, loads, placements, self.gpus, self.nodes, slots))
