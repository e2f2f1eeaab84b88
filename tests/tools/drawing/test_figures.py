"""matplotlib is optional: without it, every figure raises the same ImportError."""

import sys

import pytest

from moe_dualpipe.schedule import Costs, build, simulate
from moe_dualpipe.tools.drawing.curves import save_curves
from moe_dualpipe.tools.drawing.timeline_file import save_timeline


@pytest.mark.parametrize("save", [
    lambda path: save_timeline(simulate(build("1f1b", 2, 2), Costs()), path),
    lambda path: save_curves({"run": [{"step": 1, "loss": 5.0, "tokens_per_s": 10.0}]}, path),
], ids=["timeline", "curves"])  # fmt: skip
def test_a_figure_without_matplotlib_says_how_to_install_it(monkeypatch, tmp_path, save):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"figures need matplotlib: pip install 'moe-dualpipe\[viz\]'"):
        save(tmp_path / "figure.svg")
