"""Names from files and folders appear in figures, files and tables as they are, whatever characters they have."""

import html
import json
import re

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.messages import printable
from tests.support.traces import annotation, kernel, launch, write

FORMULA = r"_$\frac{$"  # not a valid formula, and a name that legends leave out
ODD = f"{FORMULA} a|b \x1b[31m\u202e<script>"
SHOWN = printable(ODD)


def texts_of(svg):
    return [html.unescape(text).strip() for text in re.findall(r"<text[^>]*>(.*?)</text>", svg.read_text(), re.DOTALL)]


def odd_trace(folder, name):
    """A trace with an odd name as annotation, kernel, device and stream, in a file named `name`."""
    odd = kernel(ODD, 10, 90, correlation=1) | {"args": {"device": ODD, "stream": ODD, "correlation": 1}}
    events = [annotation(ODD, 0, 10), launch(1, 5), odd, kernel("nccl", 50, 100, stream=8, device=ODD)]
    return write(folder / f"{name}.json", events)


@pytest.mark.parametrize("suffix", ["svg", "json"])
def test_traces_with_odd_names(tmp_path, capsys, suffix):
    out = tmp_path / f"x.{suffix}"
    options = ["--phases", "--out", str(out)]
    assert main(["profile", "analyze", str(odd_trace(tmp_path, ODD)), str(odd_trace(tmp_path, "b")), *options]) == 0
    printed = capsys.readouterr().out
    assert all(line.isprintable() for line in printed.splitlines())
    assert printed.count(SHOWN.replace("|", "\\|")) >= 4
    for part in printed.replace("\\|", "").split("\n\n"):
        assert len({line.count("|") for line in part.splitlines() if line.startswith("|")}) <= 1  # as many columns
    if suffix == "svg":
        assert any(text.startswith(SHOWN[:40]) for text in texts_of(out))
    else:
        names = {event["name"] for event in json.loads(out.read_text())["traceEvents"]}
        assert {ODD, "thread_name"} <= names
