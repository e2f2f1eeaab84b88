"""What a run refuses: one line that names the option and says what works, exit code 2, and nothing is written."""

import dataclasses
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from moe_dualpipe.checkpoint import global_weights
from moe_dualpipe.commands.train import main
from moe_dualpipe.messages import printable
from moe_dualpipe.models import build_model
from moe_dualpipe.training import resolve, train
from moe_dualpipe.training.extensions.replica_checks import WAY_OUT
from moe_dualpipe.training.restart import Agreed
from tests.support import special_experts
from tests.support.checkpoints import write_manifest
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, SHALLOW, SMALL, change, make_run, make_trainer, settings

# ---- The command line: processes, arguments, and how the line begins ----

TYPED = [
    (1, "--no-such-option", "unknown option '--no-such-option'; --help-all lists all"),
    (1, "--stpes 3", "unknown option '--stpes'; did you mean --steps? --help-all lists all"),
    (1, "--no-zero", "unknown option '--no-zero'; did you mean --set parallel.zero=VALUE? --help-all lists all"),
    (1, "--model.expert-options.rank 8", "unknown option '--model.expert-options.rank'; did you mean --set model.exp"),
    (1, "--micro-batches 3", "--micro-batches was removed; use --batch-size, the number of sequences per step over a"),
    (1, "--elastic 3", "--elastic was removed: a restarted run adapts its layout to the number of processes"),
    (1, "--set optim.betta2=1", "unknown key 'optim.betta2'; did you mean optim.beta2? --help-all lists all"),
    (1, "--set lr=1", "unknown key 'lr'; did you mean optim.lr? --help-all lists all"),
    (1, "--set batch.data_cache=x", "batch.data_cache was removed: files at a URL are copied to the local disk"),
    (1, "--set optim.beta2", "--set needs KEY=VALUE, such as optim.beta2=0.99: got 'optim.beta2'"),
    (1, "--preset", "--preset needs a value"),
    (1, "--pp 1.5", "--pp must be a whole number: got '1.5'"),
    (1, "--lr fast", "--lr must be a number: got 'fast'"),
    (1, "--lr 0", "--lr must be at least 1e-12: got 0.0"),
    (1, "--set parallel.zero=maybe", "parallel.zero must be true or false: got 'maybe'"),
    (1, "--set model.dense_layers=1,x", "model.dense_layers must be a list of whole numbers: got '1,x'"),
    (1, "--device tpu", "unknown --device 'tpu'; did you mean 'cpu'? Choose from: auto, cpu, cuda"),
    (1, "--schedule dualpip", "unknown --schedule 'dualpip'; did you mean 'dualpipe'?"),
    (1, "missing.toml", "cannot read missing.toml: No such file or directory"),
    (1, "notes.txt", "unexpected 'notes.txt': a file of options ends with .toml"),
    (1, "--resume runs/a/run.toml", "--resume runs/a/run.toml names a file: use --resume runs/a"),
    (1, "--data /nowhere", "--data /nowhere: no such file or folder"),
    (1, "--data /dev/null", "--data /dev/null: not a regular file: name a file, a folder or a glob"),
    (1, "--data LICENSE --seq-len 4096", "too little text in --data LICENSE"),
    (1, "--data stdlib=1e308", "--data stdlib=1e308: the weight must be at most 1e+09: got 1e+308"),
    *((1, f"{option} {'b' * 5000}", f"{'b' * 200}…: File name too long") for option in ("--out", "--weights")),
    (1, "--device cuda", "--device cuda: torch finds no GPU on this machine; use --device cpu"),
    (1, "--kernels triton --device cpu", "--kernels triton needs a GPU, and this run is on the CPU: use --kernels re"),
    (1, "--resume /nowhere", "no checkpoint in /nowhere: it does not exist"),
    (1, "--out LICENSE", "--out LICENSE is not a folder: use another --out"),
    (1, "--out LICENSE/below", "cannot create LICENSE/below: Not a directory"),
    (1, "--experts json:loads", "cannot build the expert layer 'json:loads': TypeError"),
    (1, "--experts nowhere:Experts", "cannot import the expert layer 'nowhere:Experts'"),
    (1, "--set model.vocab_size=64", "--data (bytes) needs model.vocab_size 256: got 64"),
    (1, "--set parallel.move_experts_every=5", "parallel.move_experts_every needs --ep 2 or more: with --ep 1, each"),
    (1, "--weights a --resume b", "--weights starts a new run and --resume continues an old one: use one of them"),
    (1, "--weights-partial", "--weights-partial needs --weights, the folder to load from"),
    (1, "--set model.mtp_layers=32 --seq-len 32", "model.mtp_layers 32 needs --seq-len 33 or more: got 32"),
    (1, "--set batch.special_tokens=true --document-mask", "--document-mask divides text at end tokens, which b"),
    (1, "--set optim.decay_steps=5", "optim.decay_steps 5 is for --lr-schedule wsd: cosine decays in all steps"),
    (1, "--lr-schedule wsd --steps 24", "20 warm-up and 5 decay steps do not fit into --steps 24: use fewer --warmup"),
    (1, "--set compute.fp8=experts+dispatch compute.fp8_recipe=fp32",
     "compute.fp8=experts+dispatch sends scales that are powers of two: use compute.fp8_recipe=ue8m0"),
    (1, "--set compute.fp8=experts --experts tests.support.special_experts:ScaledExperts",
     "the expert layer 'tests.support.special_experts:ScaledExperts' cannot compute in FP8: define `fp8 = None` in "),
    (1, "--set compute.cuda_graphs=true", "cuda_graphs needs a GPU, and this run is on the CPU: use compute.cuda"),
    (1, "--set compute.products=onednn", "compute.products=onednn needs oneDNN, which this PyTorch lacks: use compute"),
    (1, "--compile on", "--compile on needs a C++ compiler, but no-such-compiler was not found: install it, or set C"),
    (1, "--profile 5 --steps 6", "--profile 5 needs 7 steps, including 2 to warm up, but the run has 6: use --steps 7"),
    (2, "--batch-size 5 --micro-batch-size 1",
     "dualpipe needs an even number of micro-batches >= 2 x ranks: got 5 for 2 ranks (interleaved_overlap needs 2); "),
    (2, "--batch-size 9 --micro-batch-size 2",
     "--micro-batch-size 2 does not divide 9 sequences: use --schedule dualpipev --micro-batch-size 1"),
    (4, "--pp 1 --batch-size 6",
     "--batch-size 6 cannot be divided over 4 data-parallel ranks: use --pp 2 --schedule 1f1b"),
    (3, "--schedule dualpipe", "dualpipe needs an even number of pipeline ranks: got 3; use --schedule 1f1b"),
    (8, "", "4 layers cannot be divided over 8 pipeline stages: use --pp 4"),
    (4, "--ep 4 --num-experts 6", "--ep 4 does not divide 6 experts: use --pp 1 --ep 2"),
    (4, "--pp 2 --ep 4", "--ep 4 does not divide 2 data-parallel ranks (4 processes / 2 pipeline ranks): use --pp 1"),
    (2, "--set parallel.layers=1,2,1", "parallel.layers 1,2,1 is for 3 stages, and the schedule has 2"),
    (2, "--set parallel.layers=1,2", "parallel.layers 1,2 must be at least 1 each and sum to 4, the layers of the mo"),
    (2, "--set parallel.layers=some", "parallel.layers must be auto or numbers such as 4,4,3,3: got 'some'"),
    (4, "--pp 3", "--pp 3 does not divide 4 processes: use --pp 4"),
    (1, "--batch-size 1073741824 --micro-batch-size 1", "a schedule can have at most 524,288 chunks, one for each mi"),
]  # fmt: skip


@pytest.fixture
def alone(monkeypatch):
    """Ranks of a pretended launch do not ask each other, and this machine has no GPU, no compiler and no oneDNN."""
    monkeypatch.setattr(resolve, "agree", lambda folder, *_: Agreed(folder))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("processes,arguments,line", TYPED, ids=lambda value: str(value)[:60])
@pytest.mark.usefixtures("alone")
def test_a_command_that_is_refused_prints_one_line_on_the_first_rank(monkeypatch, capfd, processes, arguments, line):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    before = {*os.listdir()}
    for rank, expected in enumerate([f"train.py: error: {line}", ""][:processes]):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(SystemExit) as ended:
            main(arguments.split())
        printed = capfd.readouterr()
        assert (ended.value.code, printed.out) == (2, "")
        assert printed.err.startswith(expected) and printed.err.count("\n") == (not rank), printed.err
        assert printed.err.removesuffix("\n").isprintable()
    assert {*os.listdir()} == before


OUTS = {
    "new/checkpoints": "is named like the checkpoints of a run: use another name, such as new/checkpoints-run",
    "step-000010/": "is named like the checkpoints of a run: use another name, such as step-000010-run",
    "old/checkpoints/step-000001/x": "is inside the checkpoint {}/old/checkpoints/step-000001: use a folder elsewhere",
    "file": "is not a folder: use another --out",
    "nowhere": "is not a folder: use another --out",
    "file://nowhere": "is not a folder: use another --out",
    "\udcff": "is not UTF-8: use another name",
}


@pytest.mark.parametrize("out,problem", OUTS.items(), ids=range(len(OUTS)))
def test_a_folder_that_cannot_be_made_or_resumed_is_refused(tmp_path, monkeypatch, out, problem):
    monkeypatch.chdir(tmp_path)
    write_manifest(tmp_path / "old" / "checkpoints" / "step-000001")
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to("missing")
    with pytest.raises(ValueError) as error:
        make_run(["--out", out])
    assert str(error.value) == f"--out {printable(out)} {problem.format(tmp_path)}"


def test_a_link_and_a_file_url_are_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for out, folder in (("link", Path("link")), (f"file://{tmp_path}/new", tmp_path / "new")):
        assert make_run(["--out", out]).folder == folder


FILES = {
    "[optim]\nlr = true": "--lr must be a number: got True",
    "steps = 1.5": "--steps must be a whole number: got 1.5",
    "steps = inf": "--steps must be a whole number: got inf",
    "steps = true": "--steps must be a whole number: got True",
    "[compute]\ncompile = true": "unknown --compile 'True'; choose from: auto, on, off, whole",
    "[parallel]\nzero = 1": "parallel.zero must be true or false: got 1",
    "[sample]\nprompt = 3": "--prompt must be text: got 3",
    "freeze = 3": "--freeze must be a list of texts: got 3",
    "[batch]\ndata = {a = 1}": "--data must be a list of texts: got ",
    "[optimizer]\nlr = 1": "unknown key 'optimizer.lr'; did you mean optim.lr? --help-all lists all",
    "optim = 1": "unknown key 'optim'",
    "steps = ": "Invalid value (at end of document)",
    "\udcff": "'utf-8' codec can't decode",
}


@pytest.mark.parametrize("text,line", FILES.items(), ids=range(len(FILES)))
def test_a_file_that_is_refused_is_named(tmp_path, capfd, text, line):
    file = tmp_path / "x.toml"
    file.write_bytes(os.fsencode(text))
    with pytest.raises(SystemExit, match="2"):
        main([str(file)])
    printed = capfd.readouterr().err.removeprefix("train.py: error: ")
    assert printed.startswith((f"{file}: {line}", f"cannot read {file}: {line}")) and printed.count("\n") == 1


# ---- A folder that holds a run ----


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A run with the checkpoints of steps 1 and 2."""
    config = settings(tmp_path_factory.mktemp("old") / "run", steps=2, save_every=1, seq_len=16)
    train(config, verbose=False)
    return config


def cut(path):
    os.truncate(path, 0)


def add_line(path):
    path.write_text(path.read_text() + "oops\n")


LAST = "checkpoints/step-000002"
OLD_RUNS = [
    ({}, None, "--out {run} already holds a run: continue it with --resume {run}, or use another --out"),
    ({"resume": "{run}"}, None, "{run}/" + LAST + " is already at step 2: use a larger --steps"),
    ({"resume": "{run}/checkpoints/step-000001"}, None,
     "--resume {run}/checkpoints/step-000001: the run has later checkpoints, up to step-000002; use --out to continu"),
    ({"resume": "{run}/" + LAST}, (cut, f"{LAST}/rank-0-0.safetensors"),
     "{run}/" + LAST + " is broken: rank-0-0.safetensors has 0 b"),
    ({"resume": "{run}/" + LAST}, (Path.unlink, f"{LAST}/rank-0-0.safetensors"),
     "{run}/" + LAST + " is broken: cannot read rank-0-0.safetensors: No such file or directory"),
    ({"resume": "{run}", "steps": 3}, (add_line, "metrics.jsonl"),
     "{run}/metrics.jsonl, line 5: not a record with a step: 'oops'"),
    ({"resume": "{run}", "steps": 3, "optim": "muon"}, None,
     "{run}/" + LAST + " holds the state of adamw, which muon cannot use: use --optimizer adamw"),
    ({"resume": "{run}", "steps": 3, "optim": "muon"}, (Path.unlink, "run.toml"),
     "{run}/" + LAST + " has no momentum."),
    ({"resume": "{run}", "steps": 3, "model": dataclasses.replace(SHALLOW, dense_size=96)}, None,
     "{run}/" + LAST + " holds another model: dense_size was 64, now 96"),
]  # fmt: skip


@pytest.mark.parametrize("changes,damage,line", OLD_RUNS, ids=range(len(OLD_RUNS)))
def test_the_folder_of_an_old_run_that_does_not_fit(tmp_path, old, changes, damage, line):
    run = tmp_path / "run"
    shutil.copytree(old.checkpoint.out, run)
    if damage:
        damage[0](run / damage[1])
    before = sorted(run.rglob("*"))
    changes = {name: value.format(run=run) if isinstance(value, str) else value for name, value in changes.items()}
    if "optim" in changes:
        changes["optim"] = dataclasses.replace(old.optim, name="muon")
    with pytest.raises(ValueError) as error:
        train(change(old, out=str(run), **changes), verbose=False)
    assert str(error.value).startswith(line.format(run=run)) and "\n" not in str(error.value)
    assert {*run.rglob("*")} <= {*before, run / "run.toml"}


def test_a_resumed_run_without_its_options_or_its_data_says_what_to_give(tmp_path, old, capfd, monkeypatch):
    shutil.copytree(old.checkpoint.out, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    text = (tmp_path / "run" / "run.toml").read_text()
    (tmp_path / "run" / "run.toml").write_text(re.sub("^data = .*", 'data = ["here/*.md"]', text, flags=re.MULTILINE))
    for line in (
        "--data here/*.md: no such file or folder, and no file matches it as a glob; "
        f"this --data is that of run.toml, and the current folder is {tmp_path}",
        "--resume run: run.toml with the options of this run is missing: "
        "give --data, and every other option that differs from its default",
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["--resume", "run", "--steps", "5", "--device", "cpu"])
        assert capfd.readouterr().err == f"train.py: error: {line}\n"
        (tmp_path / "run" / "run.toml").unlink(missing_ok=True)


# ---- From Python ----

TOKENS = torch.zeros(4, 32, dtype=torch.int64)
SHAPE = "batches(0) must be (inputs, labels), each [4, 32]: got"
GIVEN = [
    ({"weights": "a"}, {"weights": {}}, "`weights` and CheckpointConfig(weights=...) both say where to start: use one"),
    ({}, {"validation": (TOKENS, TOKENS)}, "`validation` needs `batches`: without them, the held-out text of the dat"),
    ({"eval_every": 3}, {"batches": lambda _: None}, "eval_every=3 with `batches` needs `validation`"),
    ({"out": None, "save_every": 5}, {}, "save_every=5 writes files: name a folder, CheckpointConfig(out=...)"),
    ({"out": None, "profile": 2}, {}, "profile=2 writes files: name a folder, CheckpointConfig(out=...)"),
    ({"freeze": "head.weight"}, {}, "--freeze must be a list of texts: got 'head.weight'"),
    ({}, {"batches": lambda _: (TOKENS, TOKENS[:, 1:])}, f"{SHAPE} [4, 32], [4, 31]"),
    ({}, {"batches": lambda _: TOKENS}, f"{SHAPE} [4, 32]"),
    ({}, {"batches": lambda _: None}, f"{SHAPE} NoneType"),
    ({}, {"batches": lambda _: (TOKENS.numpy(),) * 2}, f"{SHAPE} ndarray, ndarray; make tensors of arrays with torch."),
    ({}, {"batches": lambda _: (TOKENS.float(), TOKENS)}, "batches(0): inputs must be token ids, integers: got torch"),
    ({}, {"batches": lambda _: (TOKENS + 256, TOKENS)}, "batches(0): inputs must be from 0 to 255: got 256"),
    ({}, {"batches": lambda _: (TOKENS, TOKENS - 1)}, "batches(0): labels must be from 0 to 255, or -100 for one to "),
    ({}, {"batches": lambda _: (TOKENS, TOKENS), "validation": (TOKENS[:3], TOKENS[:3])},
     "validation must be (inputs, labels), each a multiple of [4, 32]: got [3, 32], [3, 32]"),
    ({"document_mask": True}, {"batches": lambda _: (TOKENS, TOKENS)}, "--document-mask: these token ids do not tell"),
]  # fmt: skip


@pytest.mark.parametrize("changes,given,line", GIVEN, ids=range(len(GIVEN)))
def test_what_a_program_passes_and_does_not_fit(tmp_path, changes, given, line):
    with pytest.raises(ValueError) as error:
        train(change(settings(tmp_path / "run"), **changes), verbose=False, **given)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


# ---- What a rank cannot build: the same line on all ranks ----


def with_experts(name):
    layer = getattr(special_experts, name, None)
    return {"model": dataclasses.replace(SHALLOW, experts=special_experts.named(layer) if layer else name)}


class PackedScale(torch.nn.Module):
    """`scale` holds all experts of a rank, in its second dimension."""

    def __init__(self, config, num_local_experts):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(num_local_experts, config.hidden_size))
        self.scale = torch.nn.Parameter(torch.ones(config.hidden_size, num_local_experts))

    def reset_expert(self, e):
        pass


class Late(torch.nn.Module):
    """Creates a parameter in its first forward."""

    def __init__(self, config, num_local_experts):
        super().__init__()
        self.up = torch.nn.Parameter(torch.ones(num_local_experts, config.hidden_size))

    def forward(self, x_MD, expert_offsets):
        if not hasattr(self, "late"):
            self.late = torch.nn.Parameter(torch.ones(1))
        return x_MD * self.late


MIXED = (
    "--freeze matches layers.1.mlp.experts.gate_up.1, but not layers.1.mlp.experts.gate_up.0, which is in the same "
    "parameter: use 'layers.1.mlp.experts.gate_up.*' for all"
)
UNEQUAL = (
    "`batches` are not the same on all ranks: those of 1 rank (1) differ from those of rank 0; pass the sequences of "
    "the whole step on every rank"
)
MOVES = {"pp": 1, "ep": 2, "move_experts_every": 1}
LAYERS = [
    ({"freeze": ("embeding.weight",)}, "--freeze 'embeding.weight' matches no parameter; near names: embedding.weigh"),
    ({"freeze": ("head.*", "layers.1.mlp.expert.*")},
     "--freeze 'layers.1.mlp.expert.*' matches no parameter; near names: layers.*.mlp.experts."),
    ({"freeze": ("layers.1.mlp.experts.gate_up.[123]",)}, MIXED),
    ({"freeze": ("*",)}, "all parameters of the model are frozen (requires_grad=False): there is nothing to train"),
    (with_experts("tests.support.custom_experts:FailsFor2") | {"pp": 1, "ep": 2, "batch_size": 4},
     "stages.1.weight.2 has shape [32, 32] in a layer with experts 2-3, and no tensor in one with"),
    (with_experts(f"{__name__}:PackedScale") | MOVES, "share layers.1.mlp.experts.scale, so they cannot move to other"),
    (with_experts(str(ROOT / "examples/layers/widths.py:WideOrNarrow")) | MOVES, "are built for their ids, so they c"),
    (with_experts(f"{__name__}:Late") | {"recompute": "attention"},
     "layers.1.mlp.experts.late was created after the optimizer was built: create it"),
    (with_experts("RunningExperts"), f"the forward changes the buffer layers.1.mlp.experts.scale: {WAY_OUT}"),
]  # fmt: skip


def unequal_batches(_step):
    return torch.full((4, 32), torch.distributed.get_rank()), torch.zeros(4, 32, dtype=torch.int64)


def errors_until_a_step(rank, starts):
    """The error of each start with these options and weights or batches, or of its first step."""
    found = []
    for config, given in starts:
        with pytest.raises((ValueError, RuntimeError)) as error:
            make_trainer(rank, config, **given).step(0)
        found.append(str(error.value))
    return found


def given_weights():
    """Weights that do not fit, and the error: also if only the other rank holds the weight."""
    weights = global_weights(build_model(SHALLOW))
    without = lambda name: {other: tensor for other, tensor in weights.items() if other != name}  # noqa: E731
    return [
        (without("head.weight"), "`weights` has no head.weight: it must have all weights of the model"),
        (without("layers.1.mlp.experts.down.0"), "`weights` has no layers.1.mlp.experts.down.0: it must have all"),
        (weights | {"extra.3": torch.ones(1), "extra.4": torch.ones(1)},
         "`weights` has names that the model does not have: extra.3 (and 1 like it)"),
        (weights | {"head.weight": torch.ones(3)}, "`weights`: head.weight has shape [3], expected [256, 32]"),
        (weights | {"head.weight": 1.0}, "`weights`: head.weight is not a tensor, but float"),
    ]  # fmt: skip


def test_what_cannot_be_built_or_trained_is_one_line_on_all_ranks(tmp_path):
    layers = [(settings(tmp_path / str(i), **{"seq_len": 16} | one), {}) for i, (one, _) in enumerate(LAYERS)]
    weights, config = given_weights(), settings(tmp_path, schedule="1f1b")
    given = [{"batches": unequal_batches}, *({"weights": one} for one, _ in weights)]
    first, second = run_ranks(2, errors_until_a_step, [*layers, *((config, one) for one in given)])
    assert first == second
    for found, (_, line) in zip(first, [*LAYERS, ({}, UNEQUAL), *weights], strict=True):
        assert line in found and "\n" not in found, found


GRAPHS, WHOLE = "compute.cuda_graphs=true model.experts_per_token=1 --kernels triton", "--compile whole"
NOT_ONE_CALL = [
    (2, f"--set {GRAPHS}", "cuda_graphs is for one process: got 2; use compute.cuda_graphs=false"),
    (1, f"--set {GRAPHS} --kernels reference",
     "cuda_graphs needs kernels without host syncs: got --kernels reference; use --kernels triton"),
    (1, f"--set {GRAPHS} --router tests.support.own_layers:PlainRouter",
     "cuda_graphs cannot contain your own router: use compute.cuda_graphs"),
    (1, f"--set model.z_loss=1e-3 {GRAPHS}", "cuda_graphs cannot count z_loss: use factors of 0, or compute.cuda_gra"),
    (1, f"--set model.mtp_layers=1 {GRAPHS}", "cuda_graphs cannot count the MTP loss: use model.mtp_layers=0, or com"),
    (1, f"--set {GRAPHS} --profile 2",
     "cuda_graphs runs no schedule to profile: use --profile 0, or compute.cuda_graphs=false"),
    (1, f"{WHOLE} --set compute.cuda_graphs=true",
     "--compile whole and cuda_graphs exclude each other: use compute.cuda_graphs=false"),
    (1, f"{WHOLE} --recompute norms",
     "--compile whole saves what torch.compile chooses: use --recompute none, or --compile on"),
    (1, f"{WHOLE} --set compute.fp8=experts",
     "--compile whole cannot trace products in FP8: use compute.fp8=off, or --compile on"),
    (1, f"{WHOLE} --fused-loss",
     "--compile whole cannot trace the loss in blocks: use compute.fused_loss=false, or --compile on"),
    (2, WHOLE, "--compile whole is for one process: got 2; use --compile on"),
    (1, f"{WHOLE} --experts tests.support.special_experts:ScaledExperts",
     "--compile whole cannot contain your own experts: use --compile"),
    (1, f"{WHOLE} --set model.sequence_loss=1e-3",
     "--compile whole cannot count sequence_loss: use factors of 0, or --compile on"),
    (1, f"{WHOLE} --set batch.record_routes=routes",
     "--compile whole cannot look up routes: leave out record_routes and replay_routes, or"),
]  # fmt: skip


def test_what_one_call_cannot_contain_is_neither_captured_nor_compiled_as_a_whole(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Unheard-of")
    monkeypatch.setattr(resolve, "agree", lambda folder, *_: Agreed(folder))
    for gpus, arguments in ((2, f"--set {GRAPHS}"), (0, WHOLE)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        make_run(arguments.split())
        for processes, more, reason in (row for row in NOT_ONE_CALL if (WHOLE in row[1]) == (arguments == WHOLE)):
            with pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
                make_run(more.split(), 0, processes)


@pytest.mark.parametrize("layer,code,problem", [
    ("Product", 1, r"Product.forward \(layer 1, mlp forward, experts\): "
     r"RuntimeError: (mm: )?mat1 and mat2 shapes cannot be multiplied \(\d+x32 and 3x3\)"),
    ("Reset", 2, r"Reset.reset_expert \(layer 1, experts\): AttributeError: 'Reset' object has no attribute 'down'"),
])  # fmt: skip
def test_an_error_in_a_layer_is_one_line_with_code_2_if_it_cannot_be_built(tmp_path, capfd, layer, code, problem):
    with pytest.raises(SystemExit) as ended:
        main([*map(str, SMALL), "--out", str(tmp_path), "--experts", f"tests.support.broken_layers:{layer}"])
    printed = re.sub(r"\r.*\r", "", capfd.readouterr().err)
    assert ended.value.code == code
    assert re.fullmatch(rf"train.py: error: tests/support/broken_layers.py:\d+ in {problem}\n", printed)
