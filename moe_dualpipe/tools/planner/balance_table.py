"""How even the loads of GPUs are under several placements of experts, in a table and a sentence."""

from collections.abc import Mapping, Sequence

from ...expert_parallel.placement import Loads, Placement, imbalance
from ...messages import plural
from ..drawing.tables import markdown


def balance_report(
    layers: Sequence[int], loads: Loads, placements: Mapping[str, Placement | None], gpus: int, nodes: int, slots: int
) -> str:
    """placements: by name; None: impossible. The first is the present one, the last the best one."""
    columns, means = [], []
    for placement in placements.values():
        values = imbalance(placement.gpu_loads(loads)) if placement else []
        means.append(sum(values) / len(values) if values else None)
        columns.append([f"{value:.2f}" for value in (*values, means[-1])] if values else ["-"] * (len(layers) + 1))
    names = [*map(str, layers), "mean"]
    summary = "Load of the fullest GPU, divided by the mean."
    if means[0] is not None and means[-1] is not None:
        summary += f" The products of experts would take {means[-1] / means[0]:.2f} of their time."
    return "\n\n".join([
        f"{plural(gpus, 'GPU')} on {plural(nodes, 'node')}, {plural(slots, 'slot')} in each layer for "
        f"{plural(len(loads[0]), 'expert')}",
        markdown([["layer", *placements], *(list(row) for row in zip(names, *columns, strict=True))]),
        summary,
    ])  # fmt: skip
