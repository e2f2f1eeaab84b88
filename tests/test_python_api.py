"""`import moe_dualpipe`, the notebook, and the programs of docs/python_api.md."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moe_dualpipe
from moe_dualpipe.expert_parallel import Link
from tests.support.runs import TEXT

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
SMALLER = {
    "steps=100": "steps=3",
    "layers=2, seq=256, tokens=1024": "layers=1, seq=64, tokens=128",
    "rounds=1": "rounds=1, link=Link(0.1)",  # recorded once, not until a fitted link agrees with the recording
}
PAGE = (ROOT / "docs" / "python_api.md").read_text()


def test_the_package_offers_names_without_importing_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import moe_dualpipe as m; print(m.build_schedule('1f1b', 1, 1).name)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "1f1b\n"
    for name in moe_dualpipe.__all__:
        assert callable(getattr(moe_dualpipe, name))
        assert f"`{name}`" in PAGE, f"docs/python_api.md does not name {name}"
    with pytest.raises(AttributeError, match="has no attribute 'streams'"):
        moe_dualpipe.streams  # noqa: B018


def test_the_notebook_runs_and_prints_what_is_stored_in_it(monkeypatch, capsys, tmp_path):
    """In this process: a kernel takes seconds to start, and imports torch again. Figures need no display."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("matplotlib").use("agg")
    variables, stored = {"Link": Link}, {"deterministic": 0, "figures": 0}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"]).replace("%matplotlib inline\n", "")
        for value, fewer in SMALLER.items():
            source = source.replace(value, fewer)
        source = source.replace("batch=BatchConfig(", f"batch=BatchConfig(data=({TEXT!r},), ")
        exec(compile(source, "a cell", "exec"), variables)
        printed = capsys.readouterr().out
        texts = ["".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream"]
        assert bool(printed) == bool(texts)
        stored["figures"] += sum("image/png" in output.get("data", {}) for output in cell["outputs"])
        if "deterministic" in cell["metadata"].get("tags", ()):
            stored["deterministic"] += 1
            assert texts == [printed]
    assert stored == {"deterministic": 8, "figures": 10}
    assert NOTEBOOK.stat().st_size < 300_000
    assert not [*tmp_path.iterdir()]


def test_the_page_shows_the_example_as_it_is():
    assert f"```python\n{(ROOT / 'examples' / 'own_loop.py').read_text()}```\n" in PAGE


def test_the_program_with_its_own_batches_runs():
    (program,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "batches=count" in code]
    variables = {}
    exec(program, variables)
    assert 0 < variables["loss"] < 5.5  # log(256) = 5.55 before


def test_the_first_program_of_the_page_runs(capsys):
    program = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    fewer = program.replace("steps=10", "steps=2").replace("seq_len=64", f"data=({TEXT!r},), seq_len=16")
    variables = {}
    exec(fewer.replace("< 3.5", "< 99"), variables)
    assert re.fullmatch(r"step 1: loss \d\.\d\d\n", capsys.readouterr().out)
    assert 5 <= len(variables["text"]) <= 20  # 20 bytes; a character has up to 4
