"""Lanes as an image and as a file for ui.perfetto.dev: all work at its place, whatever its name."""

import gzip
import html
import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.cli import main
from moe_dualpipe.messages import printable
from moe_dualpipe.tools.drawing.timeline import LABELS
from moe_dualpipe.tools.profiler.pictures.lanes import (
    COLORS,
    COPIES,
    EXPOSED,
    HIDDEN,
    MAX_PICTURES,
    PIXELS,
    fitting,
    lanes_figure,
    save_lanes,
)
from moe_dualpipe.tools.profiler.pictures.picture import runs
from tests.support.pictures import picture
from tests.support.traces import annotation, kernel, launch, write

pytest.importorskip("matplotlib")

STYLES = {"gemm": "GEMM", "vectorized_elementwise_kernel": "elementwise", "odd": "other", "ncclA": HIDDEN,
          "Memcpy HtoD": COPIES}  # fmt: skip
TRANSFER, COPY = "ncclA", "Memcpy HtoD"


def pixels(shown):
    """The label of the color of each pixel of each row, "" for none, and its opacity."""
    from matplotlib.colors import to_hex

    labels = {color: label for label, color in COLORS.items()}
    rows = [image.get_array()[0] for image in lanes_figure([shown]).axes[0].images]
    return [[(labels[to_hex(pixel[:3])], pixel[3]) if pixel[3] else ("", 0) for pixel in row] for row in rows]


def texts(tmp_path, *pictures):
    """Draw the pictures as an image and return its texts."""
    save_lanes(pictures, tmp_path / "lanes.svg")
    return re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "lanes.svg").read_text())


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*STYLES]), st.integers(0, 1000), st.integers(1, 190)), max_size=9),
    st.integers(0, 5),
)  # fmt: skip
def test_each_pixel_has_the_color_of_its_work(drawn, shift):
    """A pixel is 1 us. Of several styles, the first of the legend is shown. Exposed transfers have a strip."""
    works = [("gemm", PIXELS - shift - 5, PIXELS - shift), *((n, a, min(a + length, 1190)) for n, a, length in drawn)]
    found = pixels(picture(*works, shift=float(shift)))
    at = [{STYLES[name] for name, a, b in works if a + shift <= p < b + shift} for p in range(PIXELS)]
    order, lanes = [*COLORS], [{"GEMM", "elementwise", "other"}, {HIDDEN}, {COPIES}]
    expected = [[min(own & styles, key=order.index, default="") for styles in at] for own in lanes]
    strip = [EXPOSED if styles == {HIDDEN} else "" for styles in at]
    rows = [expected[0], *(expected[1:2] if any(expected[1]) else []), *([strip] if any(strip) else []),
            *(expected[2:] if any(expected[2]) else [])]  # fmt: skip
    assert [[label for label, _ in row] for row in found] == rows


def test_short_work_is_drawn_by_its_share():
    """Of kernels shorter than a pixel, the most time counts. A quarter of each transfer is exposed."""
    works = [work for at in range(0, 50_000, 10) for work in (
        ("gemm", at, at + 5), ("vectorized_elementwise_kernel", at + 5, at + 7.5), (TRANSFER, at, at + 10, "", "9")
    )]  # fmt: skip
    computing, sending, strip = pixels(picture(*works))
    assert {label for label, _ in computing} == {"GEMM"} and {label for label, _ in sending} == {HIDDEN}
    assert np.mean([opacity for _, opacity in strip]) == pytest.approx(0.25)


def test_runs_end_at_another_phase_a_gap_and_another_stream():
    shown = picture(("a", 0, 9, "x"), ("b", 2, 4, "x"), ("b", 9, 10), ("b", 11, 12), ("c", 12, 13), ("a", 20, 21, "x"),
                    ("a", 22, 23, "x", "9"))  # fmt: skip
    expected = [(0, 9, "x"), (9, 12, "b"), (12, 13, "c"), (20, 21, "x"), (22, 23, "x")]
    assert sorted(one[:3] for one in runs(shown.work, 3.0)) == expected and len([*runs(shown.work, 0.5)]) == 6
    twice = picture(("a", 0, 4, "mlp(F)"), ("n", 1, 2, "attn(B)", "9"), ("b", 4, 9, "mlp(F)"))  # entered twice
    assert sorted(one[:3] for one in runs(twice.work, 3.0)) == [(0, 4, "mlp(F)"), (1, 2, "attn(B)"), (4, 9, "mlp(F)")]


LETTERS = ("gemm", 0, 50, "mlp(F)"), ("ncclA", 0, 100, "combine(B)", "9")


@pytest.mark.parametrize("works,legend,lanes", [
    ([("k", 0, 900, "mlp(B)"), ("k", 900, 999, "attn(W)")], [LABELS["B"], LABELS["W"]], 1),
    ([("k", 0, 900, "mlp(I)"), ("k", 900, 999)], [LABELS["I"], "other"], 1),
    ([(TRANSFER, 0, 9), (COPY, 0, 9), ("gemm", 0, 9)], ["GEMM", HIDDEN, COPIES], 3),
    (LETTERS, [LABELS["F"], LABELS["B"], EXPOSED], 2),
])  # fmt: skip
def test_the_legend_has_the_colors_that_are_seen_and_lanes_without_work_are_left_out(tmp_path, works, legend, lanes):
    found = texts(tmp_path, picture(*works))
    assert found[-len(legend) :] == legend
    every = ["computation", "communication", "copies"]
    assert [text for text in found[: -len(legend)] if text in every] == every[:lanes]


def test_at_most_eight_devices_are_drawn(tmp_path):
    found = texts(tmp_path, *[picture(("k", 0, 1))] * (MAX_PICTURES + 2))
    assert "2 more devices not drawn" in found and found.count("title") == MAX_PICTURES


def test_the_command_draws(tmp_path, capsys):
    events = [annotation("mlp(W)", 0, 10), launch(1, 5), kernel("gemm", 10, 30, correlation=1)]
    path = str(write(tmp_path / "trace.json", events))
    assert main(["profile", "analyze", path, "--out", str(tmp_path / "lanes.svg")]) == 0
    drawn = (tmp_path / "lanes.svg").read_text()
    assert ">mlp(W)</text>" in drawn and f">{LABELS['W']}</text>" in drawn
    (tmp_path / "folder.svg").mkdir()
    capsys.readouterr()
    for out, problem in (
        ("folder.svg", "it is a folder"), ("lanes.html", "use one of .png, .svg, .json, .json.gz"),
        ("no/lanes.png", "does not exist"),
    ):  # fmt: skip
        assert main(["profile", "analyze", path, "--out", str(tmp_path / out)]) == 2
        err = capsys.readouterr().err
        assert problem in err and err.count("\n") == 1


# ---- Files for ui.perfetto.dev: all work of all devices on one clock, in rows that the viewer shows as they are ----


works = st.tuples(
    st.sampled_from(["a", "ncclA", "Memcpy HtoD"]), st.integers(0, 40), st.integers(0, 9),
    st.sampled_from(["", "mlp(F)"]), st.sampled_from("123"),
).map(lambda one: (one[0], one[1] / 3, (one[1] + one[2]) / 3, *one[3:]))  # fmt: skip


def saved(path, *pictures):
    """The file's processes: name and rows, each a title and slices in ns (start, end, name, args), in their order."""
    save_lanes(pictures, path)
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    events = json.loads(text, parse_constant=pytest.fail)["traceEvents"]
    names = {(e["pid"], e["tid"], e["name"]): e["args"] for e in events if e["ph"] == "M"}
    rows: dict[tuple[int, int], list[tuple[int, int, str, dict]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            start = round(e["ts"] * 1e3)
            rows[e["pid"], e["tid"]].append((start, start + round(e["dur"] * 1e3), e["name"], e["args"]))
    found = []
    for process in sorted({e["pid"] for e in events}):
        own = sorted((k for k in rows if k[0] == process), key=lambda k: names[*k, "thread_sort_index"]["sort_index"])
        titled = [(names[*key, "thread_name"]["name"], rows[key]) for key in own]
        found.append((names[process, 0, "process_name"]["name"], titled))
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.lists(works, max_size=12), st.integers(0, 50)), min_size=1, max_size=3))
def test_all_work_is_in_rows_without_overlap(tmp_path_factory, devices):
    pictures = [picture(*own, shift=by / 7, title=f"rank {i}") for i, (own, by) in enumerate(devices)]
    found = saved(tmp_path_factory.mktemp("view") / "view.json", *pictures)
    assert [name for name, _ in found] == [picture.title for picture in pictures]
    for (own, by), (_, rows) in zip(devices, found, strict=True):
        for _, slices in rows:
            assert all(end <= start for (_, end, *_), (start, *_) in pairwise(slices))

        def ns(time, by=by / 7):
            return round((time + by) * 1e3)

        streams = sorted((title, *one[:3]) for title, slices in rows if title.startswith("stream ") for one in slices)
        assert streams == sorted((f"stream {stream}", ns(a), ns(b), name) for name, a, b, _, stream in own)


def test_an_account_causes_and_phases_are_rows(tmp_path):
    """Causes count from the start of the first event, as a trace does not begin at 0."""
    shown = picture(("a", 5, 9, "mlp(F)"), ("b", 10, 14, "mlp(F)"), ("c", 14, 17, "attn(B)"), shift=95.0)
    cause: Any = SimpleNamespace(kind="imbalance", title="Late.", evidence=("a",), remedy="balance", start_us=3,
                                 end_us=5, cost_us=7, gain_us=2)  # fmt: skip
    ((_, rows),) = saved(tmp_path / "view.json.gz", replace(shown, verdicts=[cause]))
    spans = [(one.start_us, one.end_us) for one in shown.account]
    assert rows[0][0] == "account" and [one[:2] for one in rows[0][1]] == [
        (round((a + 95) * 1e3), round((b + 95) * 1e3)) for a, b in spans
    ]
    assert rows[0][1][0][2:] == ("computation", {"detail": shown.account[0].detail})
    facts = {"kind": "imbalance", "evidence": ["a"], "what to change": "balance", "time, us": 7, "gain, us": 2}
    assert rows[1] == ("causes", [(103_000, 105_000, "Late.", facts)])
    assert rows[2] == (
        "computation, phases", [(100_000, 109_000, "mlp(F)", {}), (109_000, 112_000, "attn(B)", {})]
    )  # fmt: skip


def test_the_file_is_never_one_of_the_traces(tmp_path, capsys):
    path = write(tmp_path / "rank0.json", [kernel("gemm", 0, 1)])
    before = path.read_bytes()
    assert main(["profile", "analyze", str(tmp_path), "--out", f"{tmp_path}/../{tmp_path.name}/rank0.json"]) == 2
    err = capsys.readouterr().err
    assert "is one of the traces: choose another name" in err and err.count("\n") == 1 and path.read_bytes() == before


# ---- Names from files and folders appear as they are, whatever characters they have ----


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


def test_a_label_is_as_long_as_its_box_allows():
    found = [fitting("dispatch(F)", inches) for inches in (0.9, 0.7, 0.5, 0.2, 0.02)]
    assert found[:2] == ["dispatch(F)", "dispatch"] and found[3:] == ["F", ""]
    assert found[2].endswith("…") and "dispatch".startswith(found[2][:-1])
    assert fitting("ncclKernel", 0.2) == ""  # it has no letter


def test_work_of_several_streams_under_one_name_has_one_label(tmp_path):
    work = [("a", 0, 500, "mlp(W)", "1"), ("b", 490, 900, "mlp(W)", "2"), ("c", 901, 1000, "mlp(F)", "1")]
    assert [text for text in texts(tmp_path, picture(*work)) if text.startswith("mlp")] == ["mlp(W)", "mlp(F)"]
