"""docs/custom_layers.md, followed literally: its expert trains, its check passes, and its mistake is found."""

import re
from typing import Any

import pytest

from moe_dualpipe import cli
from moe_dualpipe.models import build_model
from tests.support.models import with_choices
from tests.support.runs import ROOT, SMALL, losses, records

PAGE = (ROOT / "docs" / "custom_layers.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PYTHON = [block for language, block in BLOCKS if language == "python"]
PRINTED = [block for language, block in BLOCKS if not language]
MISTAKE = next(code for code in PYTHON if "rows.mean" in code).strip()


@pytest.fixture
def expert(tmp_path, monkeypatch):
    """The first expert of the page, as my_experts.py in the current folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my_experts.py"
    file.write_text(PYTHON[0])
    return file


def verdicts(report):
    """The names of the checks and their results."""
    return re.findall(r"^(\S.*?  +[A-Za-z]+)  ", report, re.MULTILINE)


def check(capsys):
    code = cli.main(["check", "experts", "my_experts.py:GELUExpert"])
    return code, capsys.readouterr().out


@pytest.mark.usefixtures("expert")
def test_the_expert_trains_and_passes_the_check(capsys):
    quick = [*map(str, SMALL), "--steps", "2", "--sample-tokens", "0", "--device", "cpu"]
    cli.main(["train", *quick, "--out", "run", "--experts", "my_experts.py:GELUExpert"])
    assert len(losses(records("run"))) == 2
    capsys.readouterr()
    code, report = check(capsys)
    (page,) = (block for block in PRINTED if block.startswith("check of the expert layer"))
    assert code == 0
    assert verdicts(report) == verdicts(page) and len(verdicts(page)) > 11


def test_the_mistake_of_the_page_is_found(expert, capsys):
    lines = expert.read_text().rstrip().splitlines()
    expert.write_text("\n".join([*lines[:-1], f"        {MISTAKE}", ""]))
    code, report = check(capsys)
    (page,) = (block for block in PRINTED if block.startswith("rows independent  "))
    assert code == 1
    assert page in report


@pytest.mark.parametrize("name", ["GELUExperts", "gelu_experts", "PlainRouter", "WideOrNarrow", "some_null_experts"])
def test_the_other_layers_of_the_page_are_built(name):
    code = next(code for code in PYTHON if re.search(rf"(class|def) {name}\b", code))
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    model: Any = build_model(with_choices(**{"router" if "Router" in name else "experts": names[name]}))
    assert model.layers["1"].mlp.experts is not None
