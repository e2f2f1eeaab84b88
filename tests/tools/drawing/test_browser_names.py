"""Names from a trace never run as scripts or become markup in the page, whichever field of the trace they come from."""

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.profiler.doctor.verdict import Verdict
from moe_dualpipe.tools.profiler.pictures.lanes import save_lanes
from moe_dualpipe.tools.profiler.pictures.picture import Picture
from moe_dualpipe.tools.profiler.trace import Collective
from tests.support.browser import ENTER, ESCAPE
from tests.support.lanes import Work, lanes_of
from tests.support.lanes_page import AXIS, drawn
from tests.support.traces import annotation, kernel, launch, write

RUN = "window.hostile=1"
ATTACKS = (
    f"</title><img src=x onerror={RUN}>",  # first: the title of the page is cut
    f"<script>{RUN}</script>", f"</script><script>{RUN}</script>", f"<img src=x onerror={RUN}>",
    f"\"'><svg onload={RUN}>", f"`${{{RUN}}}` $data $script", f"]]>\";{RUN};//",
    f"<!--<script>{RUN}</script>",
)  # fmt: skip


def hostile(field):
    """All attacks at once. The name of the field comes first, so that it can be found on the page."""
    return f"{field} {' '.join(ATTACKS)}"


def explored(page):
    """Show everything that the page has: tips and details of each row, causes, hits. Returns all texts seen."""
    seen = [page.script("return document.title")]
    for y in sorted({rect["y"] + rect["height"] / 2 for rect in drawn(page)["rects"] if rect["x"] >= AXIS}):
        for x in (AXIS + 30, AXIS + 350):
            page.click("#lanes", x, y)
            page.hover("#lanes", x, y)
            seen += page.script("return ['details', 'tip'].map((id) => document.getElementById(id).textContent)")
            assert page.script("return document.querySelectorAll('img, svg').length") == 0
    for number in range(page.script("return document.querySelectorAll('.verdict').length")):
        page.script("document.querySelectorAll('.verdict')[given[0]].focus()", number)
        page.keys(ENTER)
    seen += page.script("return ['verdicts', 'legend'].map((id) => document.getElementById(id).textContent)")
    page.keys("/", "<script>", ENTER, ENTER, ESCAPE, "?", ESCAPE)
    return "\n".join(seen)


def check_nothing_ran(page, fields):
    """Every field was seen as it is, and nothing of it has become a script or markup."""
    seen = explored(page)
    assert [field for field in fields if hostile(field) not in seen] == []
    assert page.script("return window.hostile === undefined")
    assert page.script("return document.querySelectorAll('img, svg').length") == 0
    assert page.script("return document.scripts.length") == 2


def trace(path):
    """A trace with hostile text in every field that may hold text."""
    named = {
        "Collective name": hostile("collective"), "Process Group Name": hostile("group"), "dtype": hostile("type"),
        "Process Group Description": hostile("group description"), "Process Group Ranks": hostile("ranks"),
        "Group size": 2, "In msg nelems": 4, "Out msg nelems": 4, hostile("argument"): hostile("value"),
    }  # fmt: skip
    events = [annotation(hostile("range(F)"), 0, 60), {**annotation(hostile("operator"), 0, 50), "cat": "cpu_op"}]
    for i in range(40):
        events += [launch(i + 1, 5 + i), kernel(hostile("kernel"), 100 + 10 * i, 5, hostile("stream"), i + 1)]
    transfer = kernel("ncclDevKernel_AllReduce " + hostile("kernel"), 100, 300, 20, 99)
    events += [launch(99, 8), transfer | {"args": transfer["args"] | named}]
    for name, key in (("process_name", "name"), ("process_labels", "labels"), ("thread_name", "name")):
        events.append({"ph": "M", "name": name, "pid": 0, "tid": 7, "args": {key: hostile(name)}})
    size = {"Total Allocated": 5, "Total Reserved": 9, "Device Type": 1, "Device Id": 0, "Addr": hostile("address")}
    events.append(
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 150, "pid": 9, "tid": 1, "args": size}
    )
    properties = [{"id": 0, "name": hostile("device"), "numSms": 132}]
    return write(path, events, deviceProperties=properties, distributedInfo={"rank": 0, "backend": hostile("backend")})


def test_every_field_of_a_trace_stays_text(page, tmp_path, capsys):
    path = trace(tmp_path / "trace <img src=x onerror=window.hostile=1>.json")
    assert main(["profile", "analyze", str(path), str(path), "--out", str(tmp_path / "page.html")]) == 0
    capsys.readouterr()
    page.open(tmp_path / "page.html")
    check_nothing_ran(page, ["kernel", "range(F)", "collective", "group", "group description", "type", "stream"])


def test_every_field_of_a_picture_stays_text(page, tmp_path):
    transfer = Collective(*map(hostile, ("collective", "group", "description")), dtype=hostile("type"), size=2)
    work = Work(
        hostile("kernel"), 0, 90, phase=hostile("phase"), category=hostile("category"), stream=hostile("stream"),
        collective=transfer, bytes=7,
    )  # fmt: skip
    texts = {"kind": hostile("kind"), "title": hostile("cause"), "evidence": (hostile("evidence"),) * 2}
    found = Verdict(**texts, remedy=hostile("remedy"), place=hostile("place"), start_us=10, end_us=50, cost_us=9)
    lanes = lanes_of(work, work._replace(lane=1), work._replace(lane=2), memory=((0, 1, 2), (50, 3, 4)))
    save_lanes([Picture(hostile("title"), lanes, verdicts=[found]), Picture("second", lanes)], tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    texts = ("kernel", "phase", "stream", "collective", "group", "description", "type", "cause", "evidence", "remedy")
    check_nothing_ran(page, (*texts, "kind", "place", "title"))


@pytest.mark.parametrize("attack", ["script", "image"])
def test_the_page_refuses_other_scripts(page, tmp_path, attack):
    """Even if a name became markup, its script would not run: the policy of the page allows one script only."""
    save_lanes([Picture("title", lanes_of(Work("k", 0, 9)))], tmp_path / "page.html")
    page.open(tmp_path / "page.html")
    insert = {
        "script": f"document.body.append(Object.assign(document.createElement('script'), {{ text: '{RUN}' }}));",
        "image": f"document.body.insertAdjacentHTML('beforeend', '<img src=x onerror={RUN}>');",
    }[attack]
    page.script(insert)
    assert page.script("return window.hostile === undefined")
    assert any("Content Security Policy" in error for error in page.errors())
