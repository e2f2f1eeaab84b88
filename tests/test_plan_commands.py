"""`moe-dualpipe plan estimate` and `plan search`, as a user types them, with right and wrong input."""

import json
import re
import shlex

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.workload import PAIRED

V3 = ("plan estimate --model deepseek-v3 --gpu h800 --gpus 2048 --pp 16 --ep 64 --batch-size 15360 --dtype fp8 "
      "--schedule dualpipe --recompute norms")  # fmt: skip
OLMOE = "plan search --model olmoe-1b-7b --gpu h100 --gpus 8 --seq-len 2048 --batch-size 64"


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


def test_a_measured_step_says_what_it_changed_and_what_may_make_the_difference(capsys):
    base = "plan estimate --model qwen3-30b-a3b --gpu h100 --gpus 16 --ep 16 --batch-size 1024 --cuda-graphs partial"
    plain = json.loads(run(capsys, f"{base} --json")[1])
    seconds = plain["step_time_s"] / 0.71
    code, out, _ = run(capsys, f"{base} --measured {seconds}")
    said = re.search(r"You have (\d+)% of what others reached. The constant changes from ([\d.]+) to ([\d.]+),", out)
    assert code == 0 and said is not None and said[1] == "71"
    assert float(said[3]) / float(said[2]) == pytest.approx(1 / 0.71, rel=0.02)
    assert "The largest differences may be:" in out and "| the CPU launches every kernel (--cuda-graphs none) " in out
    assert "What would be faster: transfers of experts are hidden (--overlap)" in out
    own = json.loads(run(capsys, f"{base} --measured {seconds} --json")[1])
    assert own["step_time_s"] == pytest.approx(seconds)
    fast = run(capsys, f"{base} --measured {0.9 * plain['step_time_s']}")[1]
    assert "You have 111% of what others reached" in fast and "What would be faster" not in fast


def test_json_is_all_that_is_printed(capsys):
    code, out, _ = run(capsys, f"{V3} --json")
    report = json.loads(out)
    assert code == 0 and report["step_time_low_s"] < report["step_time_s"] < report["step_time_high_s"]


@pytest.mark.parametrize("schedule", ["--vpp 4", "--vpp 4 --schedule 1f1b", "--vpp 4 --schedule interleaved_1f1b"])
def test_virtual_stages_interleave(capsys, schedule):
    base = "plan estimate --model llama3-70b --gpu h100 --gpus 64 --tp 4 --pp 4 --seq-len 8192 --batch-size 128 --json"
    with_stages, without = (json.loads(run(capsys, f"{base} {more}")[1]) for more in (schedule, ""))
    assert with_stages["bubble_fraction"] < without["bubble_fraction"]
    assert with_stages["hidden_fraction"] <= 1


def test_the_search_prints_a_ranking_and_the_command_of_the_best(capsys):
    code, out, _ = run(capsys, f"{OLMOE} --top 3")
    assert code == 0
    rows = [line for line in out.splitlines() if line.startswith("| tp ")]
    assert len(rows) == 3 and "more (--top)" in out
    marks = [row["train_lacks"] for row in json.loads(run(capsys, f"{OLMOE} --json --top 40")[1])["ranked"]]
    assert [] in marks and ["tp 2"] in marks
    wide = run(capsys, f"{OLMOE} --top 40")[1]
    assert len(re.findall(r"\| +yes \|$", wide, re.MULTILINE)) == marks.count([]) and "| no: tp 2 |" in wide
    assert "torchrun --nproc-per-node 8 train.py --preset olmoe-1b-7b" in out or "train.py cannot run it: tp" in out


def test_the_command_of_the_best_is_accepted_by_train(capsys):
    from moe_dualpipe.training.options import parse_arguments

    report = json.loads(run(capsys, f"{OLMOE} --json")[1])
    assert [row["step_time_s"] for row in report["ranked"]] == sorted(row["step_time_s"] for row in report["ranked"])
    command = report["train_command"]
    assert command.startswith("torchrun")
    words, best = shlex.split(command), report["ranked"][0]
    options = parse_arguments(words[words.index("train.py") + 1 :])
    assert (options.parallel.pp, options.parallel.ep) == (best["pp"], best["ep"]) != (1, 1)
    assert options.batch.micro_batch_size == best["micro_batch"] and options.batch.seq_len == 2048
    assert int(words[words.index("--nproc-per-node") + 1]) == 8


def test_small_numbers_have_digits(capsys):
    base = "plan estimate --model tiny --gpu l4 --gpus 1 --seq-len 256 --batch-size 8"
    code, out, _ = run(capsys, f"{base} --explain --cuda-graphs full")
    assert code == 0 and "each GPU has all experts" in out
    values = dict(re.findall(r"^\| +(\w[\w ]+?) +\| +\+?([\d.]+)", out, re.MULTILINE))
    parts = [values[name] for name in ("weights", "activations", "temporary", "launches")]
    assert all(0 < float(part) < 0.1 and len(part) == len("0.0035") for part in parts)


def test_the_search_also_prints_the_fastest_way_that_train_can_run(capsys):
    code, out, _ = run(capsys, f"{OLMOE} --overlap")
    assert code == 0 and "train.py cannot run it: overlap in 1f1b. The fastest that it can run, " in out
    rows = json.loads(run(capsys, f"{OLMOE} --overlap --json --top 100")[1])["ranked"]
    able = next(row for row in rows if row["tp"] == 1 and (row["ep"] == 1 or row["schedule"] in PAIRED))
    seconds, words = re.search(r"can run, ([\d.]+) s:\n\n(torchrun .*)", out).groups()
    assert float(seconds) == pytest.approx(able["step_time_s"], rel=0.01)
    assert f"--pp {able['pp']} --ep {able['ep']} --schedule {able['schedule']} " in words


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
}


@pytest.mark.parametrize("command,option", [*((V3, option) for option in WRONG), (OLMOE, "--gpu h1000"),
                                            (OLMOE, "--software mine")])  # fmt: skip
def test_wrong_input_is_one_line(capsys, command, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, error = run(capsys, f"{command} {option}")
    assert code == 2 and out == "" and error.count("\n") == 1, error
    assert WRONG[option] in error


def test_a_file_may_be_the_device(capsys, tmp_path):
    source = load_device("h800")
    from moe_dualpipe.tools.planner.device import FOLDER

    (tmp_path / "mine.json").write_text((FOLDER / "h800.json").read_text().replace('"name": "h800"', '"name": "mine"'))
    report = json.loads(run(capsys, f"{V3.replace('--gpu h800', f'--gpu {tmp_path}/mine.json')} --json")[1])
    assert report["step_time_s"] > 0 and source.name == "h800"


def test_loads_of_a_run_replace_the_assumed_routing(capsys, tmp_path):
    def write(name, rows):
        (tmp_path / name).write_text(json.dumps({"layers": [*range(3, 61)], "loads": rows}))
        return f"{V3} --loads {tmp_path}/{name}"

    even, uneven = write("even.json", [[7] * 256] * 58), write("uneven.json", [[700] + [7] * 255] * 58)
    balanced = json.loads(run(capsys, f"{V3} --routing balanced --json")[1])
    report = json.loads(run(capsys, f"{even} --json")[1])
    assert report == balanced
    code, out, _ = run(capsys, f"{uneven} --explain")
    assert code == 0 and "The fullest of 64 ranks gets 18.57 times the mean, and 18.57 to 18.57 by layer" in out
    assert json.loads(run(capsys, f"{uneven} --json")[1])["step_time_s"] > balanced["step_time_s"]


@pytest.mark.parametrize("option, said", [
    ("--loads nowhere.json", "nowhere.json"), ("--loads .", "no checkpoint in"),
    ("--loads loads.json", "has loads of 2 experts, and deepseek-v3 has 256"),
    ("--loads loads.json --routing balanced", "--loads and --routing balanced contradict each other"),
])  # fmt: skip
def test_wrong_loads_are_one_line(capsys, option, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loads.json").write_text('{"loads": [[1, 2]]}')
    code, out, error = run(capsys, f"{V3} {option}")
    assert code == 2 and out == "" and error.count("\n") == 1 and said in error
