"""Planned runs for tests."""

from dataclasses import replace

from moe_dualpipe.tools.planner import Workload, layout_of


def changed(load: Workload, layout: dict[str, int] | None = None, **options) -> Workload:
    """The run with other options, and with other degrees of its layout, by the names of `layout_of`."""
    one = load.layout
    numbers = {"gpus": one.num_ranks, "tp": one.tp, "pp": one.pp, "vpp": one.chunks or 1, "ep": one.ep, "cp": one.cp}
    return replace(load, layout=layout_of(**numbers | (layout or {})), **options)
