"""The options of train.py: flags and defaults, invalid values, and the values chosen for a launch."""

import os
import re
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from moe_dualpipe.commands.train import main
from moe_dualpipe.training.config import TrainConfig
from moe_dualpipe.training.options import parse_arguments, resume_command
from tests.support.runs import ROOT, change, make_run, option_values, options

# ---- Flags ----

DEFAULTS = {
    "preset": None, "steps": 320, "seed": 0, "bias-rate": 0.003, "freeze": (), "pp": None, "ep": 1,
    "ep-backend": "auto", "expert-sums": "rank", "place-experts": None, "move-experts-every": None,
    "move-experts-gain": 0.05, "nodes-per-domain": None, "elastic": None, "schedule": "auto", "num-chunks": None,
    "overlap": True, "max-deferred": None, "zero": True, "device": "auto",
    "dtype": "auto", "kernels": "auto", "compile": "auto", "cuda-graphs": False,
    "recompute": "none", "fused-loss": False,
    "data": ("stdlib",), "data-field": "text", "data-dtype": "uint16", "seq-len": 256,
    "data-cache": None, "data-cache-gb": 20.0,
    "document-mask": False, "micro-batch-size": 2,
    "micro-batches": None, "out": None, "resume": None, "weights": None, "save-every": None,
    "keep": 3, "export": None, "save-async": True, "staging": None, "log-every": 1, "eval-every": None,
    "eval-sequences": 64, "tensorboard": False, "wandb": None, "peak-tflops": None, "profile": 0, "sample-tokens": 160,
    "prompt": "class ", "temperature": 0.8, "top-k": None, "top-p": 1.0, "timeout": 600.0, "max-skipped": 10,
    "check-memory": True, "check-replicas-every": 1, "traceback": False, "optim.name": "adamw", "optim.lr": 0.003,
    "optim.schedule": "cosine", "weights-partial": False,
    "optim.warmup-steps": 20, "optim.decay-steps": None, "optim.final-lr": 0.1, "optim.beta1": 0.9, "optim.beta2": 0.95,
    "optim.momentum": 0.95, "optim.weight-decay": 0.1, "optim.clip": 1.0,
}  # fmt: skip


def as_arguments(values):
    for flag, value in values.items():
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", *(value if isinstance(value, tuple) else [str(value)]))


def test_every_flag_has_its_name_and_default():
    values = option_values(TrainConfig())
    assert {flag: value for flag, value in values.items() if not flag.startswith("model.")} == DEFAULTS
    assert parse_arguments([]) == parse_arguments([*as_arguments(DEFAULTS)]) == TrainConfig()


def test_every_flag_sets_its_option():
    changed = {
        "steps": 7, "seed": 3, "bias-rate": 0.0, "freeze": ("head.*", "a"), "pp": 4, "ep": 2, "num-chunks": 3,
        "ep-backend": "shared", "expert-sums": "choice", "place-experts": "auto", "move-experts-every": 9,
        "move-experts-gain": 0.2, "nodes-per-domain": 18, "elastic": 6, "overlap": False, "max-deferred": 2,
        "zero": False, "recompute": "norms",
        "fused-loss": True, "data": ("a=3", "b"), "seq-len": 8, "out": "x",
        "document-mask": True, "micro-batches": 6, "resume": "y", "weights": "z", "weights-partial": True,
        "save-every": 5, "keep": None, "save-async": False, "peak-tflops": 1.5, "profile": 1, "top-k": 9,
        "check-replicas-every": None, "optim.decay-steps": 4, "optim.clip": None, "model.num-layers": 6,
    }  # fmt: skip
    values = option_values(parse_arguments([*as_arguments(changed)]))
    assert {flag: values[flag] for flag in changed} == changed


def test_zero_and_the_empty_string_mean_none():
    zeros = [
        *(
            "pp",
            "move-experts-every",
            "nodes-per-domain",
            "elastic",
            "num-chunks",
            "max-deferred",
            "micro-batches",
            "save-every",
            "eval-every",
            "keep",
            "top-k",
        ),
        *("peak-tflops", "check-replicas-every", "optim.decay-steps", "optim.clip"),
    ]
    empty = ["place-experts", "out", "resume", "weights", "wandb", "staging", "data-cache"]
    values = option_values(parse_arguments([*as_arguments({**dict.fromkeys(zeros, 0), **dict.fromkeys(empty, "")})]))
    assert {flag: values[flag] for flag in zeros + empty} == dict.fromkeys(zeros + empty)


def test_help_lists_every_flag_by_group(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    for flag in option_values(TrainConfig()):
        assert f"--{flag}" in printed
    for group in ("parallel", "compute", "batch", "checkpoint", "metrics", "sample", "health", "optim", "model"):
        assert f"{group} options" in printed
    assert "Folder for checkpoints and metrics" in printed


# ---- Invalid options ----


@pytest.mark.parametrize("world_size,arguments,message", [
    (2, ["--micro-batches", "5"],
     "dualpipe needs an even number of micro-batches >= 2 x ranks: got 5 for 2 ranks; use 6"),
    (2, ["--micro-batches", "2"],
     "dualpipe needs an even number of micro-batches >= 2 x ranks: got 2 for 2 ranks; use 4"),
    (3, ["--schedule", "dualpipe"], "dualpipe needs an even number of pipeline ranks: got 3; use 4, or dualpipev"),
    (8, [], "4 layers cannot be divided over 8 pipeline stages: use at least 8 layers, fewer pipeline ranks, or"),
    (4, ["--ep", "4", "--model.num-experts", "6"],
     "--ep 4 does not divide the 6 experts: use --ep 1 or 2 or 3 or 6"),
    (4, ["--pp", "2", "--ep", "4"],
     "--ep 4 does not divide the 2 data-parallel ranks (4 processes / 2 pipeline ranks): use --ep 1 or 2"),
    (3, ["--ep", "2"], "--ep 2 does not divide the 3 processes: start a multiple of 2 processes"),
    (4, ["--pp", "3"],
     "--pp 3 does not divide the number of processes, 4: use --pp 1, 2, 4, or start a multiple of 3 processes"),
    (1, ["--data", "/nowhere"], "--data /nowhere: no such file or folder"),
    (1, ["--data", "/dev/null"], "--data /dev/null is a device: name a regular file, a folder or a glob"),
    *((1, [option, "a\n" + "b" * 5000], f"a\\n{'b' * 198}…: File name too long")
      for option in ("--out", "--resume", "--weights")),
    (1, ["--data", "a\n" + "b" * 5000], f"--data a\\n{'b' * 198}…: File name too long"),
    (1, ["--data", "LICENSE", "--seq-len", "4096"], "too little text in --data LICENSE"),
    (1, ["--device", "cuda"], "--device cuda: torch finds no GPU on this machine; use --device cpu"),
    (1, ["--device", "tpu"], "unknown --device 'tpu'; did you mean 'cpu'? Choose from: auto, cpu, cuda"),
    (1, ["--dtype", "int8"], "unknown --dtype 'int8'; choose from: auto, float32, bfloat16"),
    (1, ["--preset", "tinny"], "unknown preset 'tinny'; did you mean 'tiny'?"),
    (1, ["--schedule", "dualpip"], "unknown schedule 'dualpip'; did you mean 'dualpipe'?"),
    (1, ["--resume", "/nowhere"], "no checkpoint in /nowhere: give the folder of a run or of a checkpoint"),
    (1, ["--data", ""], "--data is empty: name a file, a folder, a glob"),
    (1, ["--out", "LICENSE"], "cannot write to --out LICENSE: File exists"),
    (1, ["--out", "LICENSE/below"], "cannot write to --out LICENSE/below: Not a directory"),
    (1, ["--lr", "-1"], "--lr must be at least 1e-12: got -1.0"),
    (1, ["--warmup-steps", "-1"], "--warmup-steps must be at least 0: got -1"),
    (1, ["--clip", "nan"], "--clip must be at least 1e-06: got nan"),
    (1, ["--optim.beta2", "1"], "--optim.beta2 must be at least 0 and below 1: got 1.0"),
    (1, ["--optim.final-lr", "1.5"], "--optim.final-lr must be at most 1: got 1.5"),
    (1, ["--model.experts", "json:loads"], "cannot build the expert layer 'json:loads': TypeError"),
    (1, ["--ep", "3"], "--ep 3 does not divide the 8 experts: use --ep 1 or 2 or 4 or 8"),
    (1, ["--steps", "0"], "--steps must be at least 1: got 0"),
    (1, ["--timeout", "0"], "--timeout must be at least 1: got 0.0"),
    (1, ["--model.vocab-size", "64"], "--data (bytes) needs --model.vocab-size 256: got 64"),
    (1, ["--model.experts", "nowhere:Experts"], "cannot import the expert layer 'nowhere:Experts'"),
    (1, ["--model.head-dim", "7"], "head_dim must be even: got 7"),
    (1, ["--model.hidden-size", "x"], "Error parsing --model.hidden-size: invalid literal for int() with base 10: 'x'"),
    (1, ["--pp", "x"], "Error parsing --pp: invalid literal for int() with base 10: 'x'"),
    (1, ["--kernels", "cuda"], "unknown --kernels 'cuda'; choose from: auto, triton, reference"),
    (1, ["--no-such-option"], "Unrecognized options: --no-such-option"),
    (1, ["--preset"], "Missing value for argument '--preset'."),
    (1, ["--place-experts", "auto"],
     "--place-experts auto needs --ep 2 or more: with --ep 1, each rank has all experts"),
    (1, ["--move-experts-every", "5"],
     "--move-experts-every 5 needs --ep 2 or more: with --ep 1, each rank has all experts"),
    (1, ["--nodes-per-domain", "-1"], "--nodes-per-domain must be at least 1: got -1"),
    (1, ["--max-deferred", "-1"], "--max-deferred must be at least 1: got -1"),
])  # fmt: skip
def test_an_invalid_option_prints_one_line_and_exits_with_code_2(monkeypatch, capsys, world_size, arguments, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith(f"train.py: error: {message}")


def test_only_the_first_rank_prints_errors(monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    for arguments in (["--micro-batches", "3"], ["--no-such-option"], ["--model.head-dim", "7"]):
        with pytest.raises(SystemExit) as exit_:
            main(["--device", "cpu", *arguments])
        assert exit_.value.code == 2
        assert capsys.readouterr() == ("", "")


def test_a_new_run_does_not_use_the_folder_of_an_old_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert make_run(options(device="cpu")).folder == Path("runs/tiny")
    (tmp_path / "runs" / "tiny" / "checkpoints").mkdir(parents=True)
    assert make_run(options(device="cpu")).folder == Path("runs/tiny-2")
    assert make_run(options(device="cpu", out="runs/tiny")).folder == Path("runs/tiny")  # it has no checkpoint
    (tmp_path / "runs" / "tiny" / "checkpoints" / "step-000002").mkdir()
    resumed = options(device="cpu", resume="runs/tiny/checkpoints/step-000002", out="runs/tiny")
    assert make_run(resumed).folder == Path("runs/tiny")
    with pytest.raises(ValueError, match="--out runs/tiny already holds a run"):
        make_run(change(resumed, resume="runs/other"))
    with pytest.raises(SystemExit) as exit_:
        main(["--out", "runs/tiny"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == (
        "train.py: error: --out runs/tiny already holds a run: continue it with --resume runs/tiny, "
        "or use another --out\n"
    )


# ---- Values for a launch ----


def test_auto_uses_gpus_if_there_is_one_per_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for processes, device, dtype in [
        (1, "cuda", torch.bfloat16),
        (2, "cuda", torch.bfloat16),
        (4, "cpu", torch.float32),
    ]:
        setup = make_run(TrainConfig(), processes)
        assert (setup.device.type, setup.dtype) == (device, dtype)
    with pytest.raises(ValueError, match="4 processes and 2 GPUs here: start at most 2 processes, or use --device cpu"):
        make_run(options(device="cuda"), 4)


def test_auto_compiles_long_runs_on_a_cpu_if_there_is_a_compiler(monkeypatch):
    def compiled(*arguments, processes=2):
        return make_run(["--device", "cpu", *arguments], processes).compiled

    monkeypatch.setattr("moe_dualpipe.training.resolve.missing_for_compile", lambda: None)
    # A step of the preset tiny has 4,096 tokens of 5.7 MFLOP, divided over two ranks.
    assert not compiled("--steps", "8000") and compiled("--steps", "9000")
    assert not compiled("--steps", "9000", processes=4) and compiled("--steps", "9000", "--pp", "2", processes=4)
    assert compiled("--compile", "on", "--steps", "1") and not compiled("--compile", "off", "--steps", "9000")


def test_compiling_needs_a_compiler_and_headers(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    long = ["--device", "cpu", "--steps", "100000"]
    assert not make_run(long).compiled
    message = "a C++ compiler, but no-such-compiler was not found: install it, or set CXX to another one"
    with pytest.raises(ValueError, match=re.escape(f"--compile on needs {message}, or use --compile off")):
        make_run([*long, "--compile", "on"])
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert not make_run(long).compiled
    with pytest.raises(
        ValueError, match=r"--compile on needs Python's header files, but Python\.h was not found: install"
    ):
        make_run([*long, "--compile", "on"])
    Path(tmp_path, "Python.h").touch()
    assert make_run(long).compiled


def test_cuda_graphs_are_refused_where_they_cannot_be_captured(monkeypatch):
    with pytest.raises(ValueError, match="--cuda-graphs needs a GPU, and this run is on the CPU: use --no-cuda-graphs"):
        make_run(["--device", "cpu", "--cuda-graphs"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    make_run(["--cuda-graphs", "--kernels", "triton", "--model.experts-per-token", "1"])
    for processes, arguments, reason in [
        (2, "", "is for one process: got 2; use --no-cuda-graphs"),
        (1, "--kernels reference", "needs kernels without host syncs: got --kernels reference; use --kernels triton"),
        (1, "--model.router tests.support.routers:Own", "cannot capture your own router: use --no-cuda-graphs"),
        (1, "--model.z-loss 1e-3", "cannot count z_loss: use factors of 0, or --no-cuda-graphs"),
        (1, "--model.mtp-layers 1", "cannot count the MTP loss: use --model.mtp-layers 0, or --no-cuda-graphs"),
        (1, "--profile 2", "runs no schedule to profile: use --profile 0, or --no-cuda-graphs"),
    ]:
        with pytest.raises(ValueError, match=f"--cuda-graphs {re.escape(reason)}"):
            make_run(["--cuda-graphs", *arguments.split()], processes)


def layout_and_schedule(arguments, processes):
    setup = make_run(arguments, processes)
    return setup.layout.pp, setup.schedule.name, setup.schedule.num_micro_batches


def test_ranks_schedule_and_micro_batches_follow_from_the_number_of_processes():
    one = make_run(["--device", "cpu"])
    assert (one.device.type, one.dtype, one.kernels) == ("cpu", torch.float32, "reference")
    assert layout_and_schedule(["--device", "cpu"], 1) == (1, "dualpipev", 8)
    assert layout_and_schedule(["--ep", "2"], 4) == (2, "dualpipe", 8)
    assert layout_and_schedule([], 6) == (6, "dualpipe", 12)
    assert layout_and_schedule(["--pp", "3"], 3) == (3, "dualpipev", 9)
    assert layout_and_schedule(["--pp", "3", "--schedule", "interleaved_1f1b"], 3) == (3, "interleaved_1f1b", 9)
    with pytest.raises(ValueError, match="dualpipe does not take a number of chunks: got 2"):
        make_run(["--num-chunks", "2"], 2)
    with pytest.raises(ValueError, match="needs at least 2 chunks per rank: got 1; use 2, or 1f1b"):
        make_run(["--num-chunks", "1", "--schedule", "interleaved_1f1b"], 2)
    with pytest.raises(ValueError, match="--num-chunks must be at least 1: got -1"):
        make_run(["--num-chunks", "-1"], 2)


def test_a_resumed_run_uses_its_old_folder():
    inner = "runs/mine/checkpoints"
    for resume in ("runs/mine", inner, f"{inner}/step-000004"):
        assert make_run(options(resume=resume)).folder == Path("runs/mine")
    assert make_run(options(resume="runs/mine", out="x")).folder == Path("x")


def test_the_resume_command_repeats_all_other_options(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    arguments = ["--steps", "5", "--model.num-layers=6", "--resume=old", "--prompt", "a b", "--weights", "given"]
    arguments.append("--weights-partial")
    expected = "python train.py --model.num-layers=6 --prompt 'a b' --resume runs/x --steps 10"
    assert resume_command(arguments, "runs/x", 10) == expected
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert resume_command([], "runs/x", 10) == "torchrun --nproc-per-node 4 train.py --resume runs/x --steps 10"
    monkeypatch.setenv("PATH", "/elsewhere")  # without an activated environment, the command has the program's path
    assert resume_command([], "runs/x", 10).split()[0] == os.path.relpath(Path(sys.executable).with_name("torchrun"))


def test_a_preset_sets_the_defaults_of_model_options():
    config = parse_arguments(["--preset", "small", "--model.num-layers", "3", "--lr", "0.5"])
    assert (config.model.num_layers, config.model.hidden_size, config.optim.lr) == (3, 768, 0.5)
    assert parse_arguments(["--preset=small"]).model.hidden_size == 768
