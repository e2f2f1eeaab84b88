"""Layouts of planned runs for tests."""

from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.tools.planner import layout_of


def relaid(one: Layout, **changes: int) -> Layout:
    """The layout of as many GPUs with other degrees, by the names of `layout_of`."""
    numbers = {"gpus": one.num_ranks, "tp": one.tp, "pp": one.pp, "vpp": one.chunks or 1, "ep": one.ep, "cp": one.cp}
    return layout_of(**numbers | changes)
