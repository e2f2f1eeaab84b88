"""`moe-dualpipe plan estimate` and `plan search`, as a user types them, with right and wrong input."""

import json
import re
import shlex

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.commands import plan
from moe_dualpipe.schedule import NAMES
from moe_dualpipe.tools.planner.workload import PAIRED
from moe_dualpipe.training.options import parse_arguments

V3 = ("plan estimate --model deepseek-v3 --gpu h800 --gpus 2048 --pp 16 --ep 64 --batch-size 15360 --dtype fp8 "
      "--schedule dualpipe --recompute norms")  # fmt: skip
OLMOE = "plan search --model olmoe-1b-7b --gpu h100 --gpus 8 --seq-len 2048 --batch-size 16"


@pytest.fixture(autouse=True)
def _each_search_once(monkeypatch):
    """Commands print the same search in two forms."""
    search, found = plan.search, {}

    def once(*given):
        if (key := str(given)) not in found:
            found[key] = search(*given)
        return found[key]

    monkeypatch.setattr(plan, "search", once)


def run(capsys, command):
    code = main(shlex.split(command))
    out, error = capsys.readouterr()
    return code, out, error


def test_deepseek_v3_as_published(capsys):
    code, out, _ = run(capsys, f"{V3} --explain")
    assert code == 0
    hours = int(re.search(r"GPU hours for 10\^12 tokens \| +([\d,]+)", out)[1].replace(",", ""))
    assert hours == pytest.approx(180_000, rel=0.25)
    for part in ("hidden transfers", "pipeline bubble", "peak memory", "activations", "expert transfers", "software"):
        assert part in out


def test_transfers_are_hidden_unless_no_overlap_is_typed(capsys):
    hidden, exposed = (
        json.loads(run(capsys, f"{V3} --json{word}")[1])["step_time_s"] for word in ("", " --no-overlap")
    )
    assert exposed > 1.05 * hidden


def test_a_measured_step_says_what_it_changed_and_what_may_make_the_difference(capsys):
    base = "plan estimate --model qwen3-30b-a3b --gpu h100 --gpus 16 --ep 16 --batch-size 1024 --cuda-graphs partial"
    plain = json.loads(run(capsys, f"{base} --json")[1])
    seconds = plain["step_time_s"] / 0.71
    code, out, _ = run(capsys, f"{base} --measured {seconds}")
    said = re.search(r"You have (\d+)% of what others reached. The constant changes from ([\d.]+) to ([\d.]+),", out)
    assert code == 0 and said is not None and said[1] == "71"
    assert float(said[3]) / float(said[2]) == pytest.approx(1 / 0.71, rel=0.02)
    assert (
        "The largest causes of the difference may be:" in out
        and "| the CPU launches every kernel (--cuda-graphs none) " in out
    )
    assert "What would be faster: transfers of experts are hidden (--overlap)" in out
    fast = run(capsys, f"{base} --measured {0.9 * plain['step_time_s']}")[1]
    assert "You have 111% of what others reached" in fast and "What would be faster" not in fast


def test_the_search_prints_what_train_can_run_first_and_the_command_of_the_best(capsys):
    """What train.py cannot run is another table. The schedules that were tried are named."""
    code, out, _ = run(capsys, f"{OLMOE} --top 50")
    assert code == 0
    can, cannot = out.split("| train.py cannot run")
    report = json.loads(run(capsys, f"{OLMOE} --json --top 50")[1])
    marks, times = ([row[key] for row in report["ranked"]] for key in ("train_lacks", "step_time_s"))
    number = marks.count([])
    assert 0 < number < len(marks) and marks[:number] == [[]] * number
    assert times[:number] == sorted(times[:number]) and times[number:] == sorted(times[number:])
    assert [len(re.findall(r"^\| tp ", part, re.MULTILINE)) for part in (can, cannot)] == [number, len(marks) - number]
    assert " tp 2 |" in cannot and f"Schedules tried: {', '.join(NAMES)}." in out
    options = parse_arguments(shlex.split(report["train_command"].partition("train.py ")[2]))
    best = report["ranked"][0]
    assert (options.parallel.pp, options.parallel.ep) == (best["pp"], best["ep"]) != (1, 1)


def test_the_search_gives_the_command_of_the_fastest_way_that_train_can_run(capsys):
    """With --overlap, many schedules overlap only as in Megatron-LM."""
    code, out, _ = run(capsys, f"{OLMOE} --overlap --top 3")
    assert code == 0 and "more (--top)" in out
    rows = json.loads(run(capsys, f"{OLMOE} --overlap --json --top 100")[1])["ranked"]
    able = next(row for row in rows if row["tp"] == 1 and (row["ep"] == 1 or row["schedule"] in PAIRED))
    assert able == rows[0] and any("overlap in 1f1b" in row["train_lacks"] for row in rows)
    assert f"--pp {able['pp']} --ep {able['ep']} --schedule {able['schedule']} " in out


WRONG = {
    "--gpu h1000": "unknown device 'h1000'; did you mean",
    "--model deepseek-v33": "deepseek-v33",
    "--gpus 2047": "--gpus 2047 is not a multiple of tp x pp x cp",
    "--ep 48": "--ep 48 does not divide 256 experts of a layer: use --ep 64",
    "--dtype mxfp8": "h800 does not support --dtype mxfp8: use bf16, fp8",
    "--batch-size 100": "--batch-size 100 is not a multiple of micro-batch x dp = 1 x 128 = 128: use --batch-size 4096",
    "--software mine": "--software must be one of",
    "--mtp -1": "--mtp",
    "--measured 0": "--measured must be at least 1e-06: got 0",
    "--schedule zigzag": "zigzag",
    "--loads nowhere.json": "nowhere.json",
    "--loads .": "no checkpoint in",
    "--loads loads.json": "has loads of 2 experts, and deepseek-v3 has 256",
    "--placement moved": "--placement needs the measured loads",
    "--max-vio -1": "--max-vio must be at least 0",
}


@pytest.mark.parametrize("command,option", [*((V3, option) for option in WRONG), (OLMOE, "--gpu h1000")])
def test_wrong_input_is_one_line(refused, command, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loads.json").write_text('{"loads": [[1, 2]]}')
    assert WRONG[option] in refused(*command.split(), *option.split())


def test_loads_of_a_run_replace_the_assumed_routing(capsys, tmp_path):
    uneven = tmp_path / "uneven.json"
    uneven.write_text(json.dumps({"loads": [[700, 6, 7, 8] + [7] * 60] * 16, "maxima": [11.0] * 16}))
    base = f"plan estimate --model olmoe-1b-7b --gpu h100 --gpus 8 --ep 8 --loads {uneven}"
    code, out, _ = run(capsys, base)
    assert code == 0 and f"Routing: loads of 16 layers from {uneven}" in out
    rows = [row.split("|") for row in out.splitlines() if row.count("|") == 5][2:]
    given, moved, copied = (next(row for row in rows if row[1].strip() == name) for name in (
        "as given", "moved", "moved, with 1 copy on each GPU"))  # fmt: skip
    assert float(given[2]) >= float(moved[2]) > float(copied[2]) and float(given[3]) > float(copied[3])
    found = json.loads(run(capsys, f"{base} --placement copied --json")[1])
    assert found["step_time_s"] == pytest.approx(float(copied[3]), rel=0.01) and len(found["experts"][0]) == 64 + 8
