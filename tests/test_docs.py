"""The documentation is true: commands and programs do what the pages show, options and links exist, the site builds."""

import contextlib
import io
import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moe_dualpipe
from moe_dualpipe import cli
from moe_dualpipe.checkpoint.huggingface import ARCHITECTURES
from moe_dualpipe.checkpoint.huggingface.architectures import ALIASES
from moe_dualpipe.expert_parallel import Link
from moe_dualpipe.schedule import NAMES, Costs
from moe_dualpipe.schedule.compare import compare, compared
from moe_dualpipe.tools.drawing.tables import format_number
from moe_dualpipe.training import MetricsConfig
from moe_dualpipe.training.options import parse_arguments
from tests.support.runs import SHALLOW, TEXT

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT.parent / "shared" / "data" / "deepseek_v3_train_trace.json.gz"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/**/*.md"))
PAGES = [page for page in PAGES if page.exists()]
LESSON = (ROOT / "docs" / "learn_dualpipe.md").read_text()
PREDICTED = "1f1b", "interleaved_overlap --vpp 2", "dualpipev"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN = [
    (page.name, *match)
    for page in PAGES
    for match in re.findall(
        r"```\n\$ moe-dualpipe ((?:schedule|model|plan) [^\n]*)\n(.+?)```", page.read_text(), re.DOTALL
    )
]


def commands() -> list[tuple[str, str]]:
    """Every command on the pages that starts one of this project's programs, with the page."""
    found = {}
    for page in PAGES:
        text = re.sub(r" \\\n\s*", " ", page.read_text())
        lines = [line.removeprefix("$ ") for _, block in BLOCK.findall(text) for line in block.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
        for line in lines:
            if re.match(r"(PYTHONPATH=\. )?(moe-dualpipe|torchrun|python|python3|make) \S", line) and "..." not in line:
                found[line.split("  #")[0]] = page.name
    return [(page, line) for line, page in found.items()]


def without_left_out(output: str, shown: str) -> str:
    """The output without the lines that a page leaves out, where a line has only "..."."""
    parts = [re.escape(part) for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE)]
    return shown if re.fullmatch(r"(?:.+\n)".join(parts), output, re.DOTALL) else output


def check_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises for a program that does not exist, or an option that it does not know."""
    monkeypatch.setattr("moe_dualpipe.training.config.start_model", lambda *_: None)  # reads no URL
    monkeypatch.setattr("moe_dualpipe.training.options.read_toml", lambda _: {})
    monkeypatch.setattr("moe_dualpipe.training.options._run_file", lambda *_: None)
    words = [word for word in shlex.split(line) if not word.startswith("PYTHONPATH=")]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {words[1]}"
        return
    program = next((i for i, word in enumerate(words) if word in ("moe-dualpipe", "moe_dualpipe.cli")), None)
    if program is not None:
        arguments = words[program + 1 :]
        if arguments[0] == "train":
            parse_arguments(arguments[1:])
            return
        if len(arguments) <= 2 and not any(word.startswith("-") or "." in word for word in arguments):
            arguments.append("--help")  # a command that the text mentions, without its required options
        cli._parse(arguments)  # raises ValueError
        return
    script = next(i for i, word in enumerate(words) if word.endswith(".py") or word == "-m")
    if words[script] == "train.py":
        parse_arguments(words[script + 1 :])
    elif words[script] == "-m":
        module = ROOT / words[script + 1].replace(".", "/")
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists() or words[script + 1] == "pytest"
    else:
        assert (ROOT / words[script]).exists()


def test_pages_of_every_kind_show_commands():
    assert {name for name, *_ in RUN} >= {"schedules.md", "model.md"}
    assert {name for name, _ in commands()} >= {"README.md", "index.md", "training.md", "profiling.md", "benchmarks.md"}
    assert len(commands()) > 60


@pytest.mark.parametrize("page,line", commands(), ids=lambda text: text[:70])
def test_a_command_and_its_options_exist(page, line, monkeypatch):
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        try:
            check_command(line, monkeypatch)
        except SystemExit as ended:  # with code 0 after --help
            assert not ended.code, f"{page}: {line}\n{errors.getvalue()}"


@pytest.mark.parametrize("name,arguments,printed", RUN, ids=lambda text: text[:60].replace("\n", " "))
def test_a_command_prints_what_is_written_below_it(name, arguments, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file, text in re.findall(r"`(\w+\.csv)`:\n\n```\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL):
        (tmp_path / file).write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    cli.main(arguments.split())
    out, err = capsys.readouterr()
    assert without_left_out(out + err, printed) == printed, f"in {name}"


def texts(picture: Path) -> list[str]:
    return re.findall(r">([^<]+)</text>", picture.read_text())


@pytest.mark.parametrize("picture", sorted(ROOT.glob("docs/images/schedules/*.svg")), ids=lambda path: path.stem)
def test_a_picture_of_a_schedule_is_what_the_command_draws(picture, tmp_path):
    """The texts of a figure: sizes, step time, bubble, memory, and the number in every box."""
    pytest.importorskip("matplotlib")
    size = "--pp 2 --micro-batches 4" if "2_ranks" in picture.name else "--pp 4 --micro-batches 8"
    name = picture.stem.removesuffix("_2_ranks")
    half = "--cost.F 0.5 --cost.B 1 " if re.match("interleaved|zbv|dualpipev", name) else ""  # eight stages, not four
    command = f"schedule show {name} {size} {half}--until 33 --out "
    for shown in re.findall(rf"moe-dualpipe (.*)docs/images/schedules/{picture.name}", LESSON):
        assert shown == command
    cli.main([*command.split(), str(tmp_path / picture.name)])
    assert texts(tmp_path / picture.name) == texts(picture)


def test_the_numbers_of_the_lesson(capsys):
    """Those that no single command prints: schedules side by side, and predictions of the planner."""
    pairs = [compare(4, 8, Costs(FB=pair)) for pair in (3, 2)]
    for row in re.findall(r"^\| (\w+) \|(( [\d.]+ \|){4})$", LESSON, re.MULTILINE):
        found = [next(entry for entry in entries if entry.name == row[0]) for entries in pairs]
        memory = (
            found[0].in_model_stages(getattr(found[0].timeline, kind)) for kind in ("peak_activations", "parameters")
        )
        numbers = [*(entry.timeline.makespan for entry in found), *map(max, memory)]
        assert row[1] == "".join(f" {number:g} |" for number in numbers)
    rows = re.findall(r"^\| `(--model .*?)` \|(.*)$", LESSON, re.MULTILINE)
    for options, numbers in rows:
        found = [estimate(f"{options} --schedule {name}", capsys) for name in PREDICTED]
        cells = (f" {one['step_time_s']:.3g} s, {one['peak_memory_gb']:.0f} GB |" for one in found)
        assert numbers == "".join(cells)
    small, long = rows[3][0], rows[4][0]
    alone = estimate(re.sub("--pp 4", "--pp 1 --micro-batch-size 8", small), capsys)
    assert f"takes {alone['step_time_s']:.3g} s" in LESSON
    one, dual = (estimate(f"{long} --schedule {name}", capsys)["peak_memory_gb"] for name in ("1f1b", "dualpipev"))
    assert f"{dual:.0f} instead of {one:.0f} GB" in LESSON
    assert cli.main(["plan", "estimate", *long.split()]) == 0
    sent = re.findall(r"of ([\d.]+) s", capsys.readouterr().out)[0]
    assert f"They take {sent} of 266 s" in LESSON


def estimate(options: str, capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    assert cli.main(["plan", "estimate", *options.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_python_on_the_front_page_prints_what_is_written_below_it(capsys):
    found = re.findall(r"```python\n((?:(?!```).)*)```\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found
    for code, printed in found:
        exec(code, {})
        assert capsys.readouterr().out == printed


def test_the_tables_of_schedules():
    """The formulas are those of the simulator, and the step times are those of `compare`."""
    document = (ROOT / "docs" / "schedules.md").read_text()
    times = [
        compare(8, 16, Costs(2, 5, 2, 7)),
        compare(8, 16, Costs(2, 5, 2, 6)),
        compare(8, 64, Costs(2, 5, 2, 6, 0.25)),
    ]
    rows = re.findall(r"^\| \[?`(\w+)`(?:\]\(.*?\))? \| `(.*)` \|", document, re.MULTILINE)
    assert [name for name, _ in rows] == [*NAMES]
    for index, (name, cells) in enumerate(rows):
        steps = " | ".join(format_number(entries[index].timeline.makespan) for entries in times)
        assert f"| `{name}` | {steps} |" in document
        for p, M in ((4, 8), (6, 18)):
            entry = compared(name, p, p, M, Costs(3, 5, 2, 8))
            assert entry.timeline
            memory = (entry.timeline.peak_activations, entry.timeline.peak_deferred, entry.timeline.parameters)
            found = [entry.timeline.bubble[-1 if name == "dualpipev" else p // 2]]
            found += [max(entry.in_model_stages(counts)) for counts in memory]
            formulas = [re.sub(r"(\d(?=[pFBWm])|\)(?=\())", r"\1*", cell) for cell in cells.split("` | `")]
            values = {"p": p, "M": M, "F": 3, "B": 5, "W": 2, "FB": 8, "max": max}
            assert [eval(re.sub(r"\)max", ")*max", formula), values) for formula in formulas] == found, name


def test_the_reference_is_what_the_code_generates():
    written = runpy.run_path(str(ROOT / "docs" / "write_reference.py"))["page"]()
    assert (ROOT / "docs" / "reference.md").read_text() == written, "run PYTHONPATH=. python docs/write_reference.py"


def test_the_versions_of_the_front_page_and_the_lower_bounds_are_those_that_make_versions_tests():
    pins = r"^\t\$\(MAKE\) version PYTHON=python(\S+) PINS='torch==(\d+\.\d+)\S* triton==(\d+\.\d+)"
    (_, torch, triton), (python, *newest) = re.findall(pins, (ROOT / "Makefile").read_text(), re.MULTILINE)
    bounds = (ROOT / "pyproject.toml").read_text()
    lowest = re.search(r'requires-python = ">=(.+)"', bounds)[1]
    assert f'"torch>={torch}"' in bounds and f'"triton>={triton};' in bounds
    tested = f"torch {torch} to {newest[0]}, Triton {triton} to {newest[1]} and Python {lowest} to {python}."
    assert f"Tested with {tested}\n" in (ROOT / "README.md").read_text()


def test_the_table_of_published_models_has_every_architecture():
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| \w", page, re.MULTILINE)[1:] == [*ARCHITECTURES, *ALIASES]


@pytest.mark.skipif(not PUBLISHED.exists(), reason="DeepSeek's trace is not here")
def test_the_tables_of_the_published_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.json.gz").symlink_to(PUBLISHED)
    assert cli.main(["profile", "analyze", "train.json.gz"]) == 0
    (shown,) = re.findall(r"```\n(train\.json\.gz\n.*?)```", (ROOT / "docs" / "profiling.md").read_text(), re.DOTALL)
    assert without_left_out(capsys.readouterr().out, shown) == shown


# ---- Links ----


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as repository browsers and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        target, _, anchor = link.partition("#")
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {link}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.is_relative_to(ROOT / "docs" / "api")], ids=lambda page: page.stem
)
def test_pages_of_the_api_name_what_can_be_imported(page):
    for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
        pkgutil.resolve_name(name)


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- `import moe_dualpipe`, the notebook, and the programs of docs/python_api.md ----


NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
SMALLER = {
    "steps=100": "steps=2",
    "num_tokens=120": "num_tokens=4",
    "layers=2, seq=256, tokens=1024": "layers=1, seq=64, tokens=128",
    "rounds=1": "rounds=1, link=Link(0.1)",  # recorded once, not until a fitted link agrees with the recording
}
PYTHON_PAGE = (ROOT / "docs" / "python_api.md").read_text()


def test_the_package_offers_names_without_importing_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import moe_dualpipe as m; print(m.build_schedule('1f1b', 1, 1).name)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "1f1b\n"
    for name in moe_dualpipe.__all__:
        assert callable(getattr(moe_dualpipe, name))
        assert f"`{name}`" in PYTHON_PAGE, f"docs/python_api.md does not name {name}"
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
    assert f"```python\n{(ROOT / 'examples' / 'own_loop.py').read_text()}```\n" in PYTHON_PAGE


def test_the_program_with_its_own_batches_runs():
    (program,) = [
        code for code in re.findall(r"```python\n(.*?)```", PYTHON_PAGE, re.DOTALL) if "batches=count" in code
    ]
    variables: dict[str, Any] = {"SHALLOW": SHALLOW}
    exec(program.replace("steps=10", "model=SHALLOW, steps=8"), variables)
    assert 0 < variables["loss"] < 5.5  # log(256) = 5.55 before


def test_the_first_program_of_the_page_runs(capsys):
    program = re.findall(r"```python\n(.*?)```", PYTHON_PAGE, re.DOTALL)[0]
    fewer = program.replace("steps=10", "model=SHALLOW, metrics=FEW, steps=2")
    fewer = fewer.replace("seq_len=64", f"data=({TEXT!r},), batch_size=4, seq_len=16")
    variables: dict[str, Any] = {"SHALLOW": SHALLOW, "FEW": MetricsConfig(eval_sequences=4)}
    exec(fewer.replace("< 3.5", "< 99"), variables)
    assert re.fullmatch(r"step 1: loss \d\.\d\d\n", capsys.readouterr().out)
    assert 5 <= len(variables["text"]) <= 20  # 20 bytes; a character has up to 4
