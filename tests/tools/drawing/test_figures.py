"""matplotlib is optional: without it, a figure raises an ImportError that says how to install it."""

import sys

import pytest

from moe_dualpipe.schedule import Costs, build, simulate
from moe_dualpipe.tools.drawing.timeline_file import save_timeline


def test_a_figure_without_matplotlib_says_how_to_install_it(monkeypatch, tmp_path):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"figures need matplotlib: pip install 'moe-dualpipe\[viz\]'"):
        save_timeline(simulate(build("1f1b", 2, 2), Costs()), tmp_path / "figure.svg")
