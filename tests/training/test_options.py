"""The options of train.py: 48 flags, `--set`, TOML files and run.toml, and the errors of a command line."""

import contextlib
import io
import math
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_dualpipe.commands.train import main
from moe_dualpipe.models import PRESETS, ModelConfig, split
from moe_dualpipe.models import config as model_config
from moe_dualpipe.schedule import build
from moe_dualpipe.training.config import TrainConfig
from moe_dualpipe.training.layout_choice import choose
from moe_dualpipe.training.options import (
    FLAGS,
    OptionError,
    Request,
    all_keys,
    build_config,
    changes,
    option_name,
    parse,
    parse_arguments,
    read_toml,
    to_toml,
    value_of,
    words_to_resume,
)
from moe_dualpipe.training.resolve import chosen_optimizer
from moe_dualpipe.training.rules import NOTHING_GIVEN, RANGES, Given, check_options
from tests.support.runs import SMALL, make_run, option_values, options, records, without_clocks

# ---- Flags ----

DEFAULTS = {
    "preset": "tiny", "steps": 320, "seed": 0, "bias_rate": 0.003, "freeze": (), "parallel.pp": None, "parallel.ep": 1,
    "parallel.cp": 1, "parallel.ep_backend": "auto", "parallel.expert_sums": "rank",
    "parallel.move_experts_every": None, "parallel.move_experts_gain": 0.05, "parallel.nodes_per_domain": None,
    "parallel.schedule": "auto", "parallel.layers": None, "parallel.num_chunks": None,
    "parallel.overlap": True, "parallel.wgrad": "early",
    "parallel.max_deferred": None,
    "parallel.zero": True, "compute.device": "auto", "compute.dtype": "auto", "compute.kernels": "auto",
    "compute.products": "auto",
    "compute.self_test": True, "compute.compile": "auto", "compute.cuda_graphs": False,
    "compute.fp8": "off", "compute.fp8_recipe": "ue8m0", "compute.recompute": "none",
    "compute.fused_loss": False,
    "batch.data": ("stdlib",), "batch.data_field": "text", "batch.data_dtype": "uint16",
    "batch.special_tokens": False, "batch.seq_len": 256, "batch.document_mask": False, "batch.batch_size": 16,
    "batch.chat_template": None, "batch.train_on": "assistant", "batch.packing": True, "batch.too_long": "error",
    "batch.record_routes": None, "batch.replay_routes": None,
    "batch.micro_batch_size": None, "checkpoint.out": None, "checkpoint.resume": None, "checkpoint.weights": None,
    "checkpoint.weights_partial": False, "checkpoint.save_every": None, "checkpoint.keep": 3, "checkpoint.export": None,
    "checkpoint.save_async": True, "checkpoint.staging": None, "metrics.log_every": 1, "metrics.eval_every": None,
    "metrics.eval_sequences": 64, "metrics.tensorboard": False, "metrics.wandb": None, "metrics.peak_tflops": None,
    "metrics.profile": 0, "sample.sample_tokens": 160, "sample.prompt": "class ", "sample.temperature": 0.8,
    "sample.top_k": None, "sample.top_p": 1.0, "health.timeout": 600.0, "health.check_memory": True,
    "health.max_skipped": 10, "health.check_replicas_every": 1, "health.traceback": False, "optim.name": "auto",
    "optim.lr": None, "optim.schedule": "cosine", "optim.warmup_steps": 20, "optim.decay_steps": None,
    "optim.final_lr": 0.1, "optim.beta1": 0.9, "optim.beta2": 0.95, "optim.momentum": 0.95, "optim.weight_decay": 0.1,
    "optim.clip": 1.0, "lora.rank": 0, "lora.alpha": None, "lora.dropout": 0.0, "lora.targets": (),
    "lora.adapter": None, "lora.export": "merged",
}  # fmt: skip


def as_words(value):
    return list(map(str, value)) if isinstance(value, tuple) else [str("none" if value is None else value)]


def other_value(key, now):
    """A valid value of the key other than `now`."""
    first = key.kinds[0]
    if key.choices:
        return next(choice for choice in key.choices if choice != now)
    if key.list_kind:
        return (1, 0) if key.list_kind is int else ('a "b"', "c\\d=2")
    if first in (bool, int, float):
        return {bool: not now, int: (now or 0) + 1, float: (now or 0.0) + 0.25}[first]
    return "tests.own:Layer" if key.name.startswith("model.") else 'é "x"\n\\'


def changed_values(skip=("preset", "checkpoint.resume", "checkpoint.weights")):
    """Another value for every key, except for those that choose the model."""
    now = option_values(build_config({}))
    found = {name: other_value(key, now[name]) for name, key in all_keys().items() if name not in skip}
    # What depends on each other within a model.
    return found | {
        "model.num_heads": 6, "model.num_kv_heads": 3, "model.head_dim": 20, "model.rope_dim": 6,
        "model.attention": "tests.own:Layer", "model.expert_groups": 3, "model.top_groups": 2,
        "model.rotary_fraction": 0.5,
        **{f"model.{layer}_options": "rank=8" for layer in ("attention", "router", "expert", "block")},
    }  # fmt: skip


def test_there_are_48_flags_and_every_key_has_its_default():
    assert len(FLAGS) == 48 and {*FLAGS.values()} <= {*all_keys()} and len({*FLAGS.values()}) == 48
    values = option_values(parse_arguments([]))
    assert {key: value for key, value in values.items() if not key.startswith("model.")} == DEFAULTS
    assert parse_arguments([]).model == TrainConfig().model


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_sets_its_key(flag):
    key = all_keys()[FLAGS[flag]]
    value = other_value(key, key.default)
    words = [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", *as_words(value)]
    assert value_of(parse_arguments(words), key.name) == value


def test_set_takes_every_key_and_several_after_one_flag():
    values = changed_values()
    words = [f"{key}={','.join(as_words(value))}" for key, value in values.items()]
    config = parse_arguments(["--set", *words])
    assert {key: value_of(config, key) for key in values} == values
    assert parse_arguments(["--set", *words[:9], "--set", *words[9:]]) == config
    assert parse_arguments(["--set", "optim.lr=1", "--lr", "2"]).optim.lr in (1, 2)
    words = [f"model.expert_options.{one}" for one in ("rank=8", "scale=0.5")]
    own = parse_arguments(["--experts", "a:B", "--set", *words])
    assert own.model.expert_options == "rank=8 scale=0.5"


def test_zero_and_the_empty_string_mean_none():
    optional = {name: key for name, key in all_keys().items() if type(None) in key.kinds}
    assert len(optional) > 20
    for key in optional.values():
        words = ["", "none", "None"] + ["0"] * (str not in key.kinds and key.name != "optim.lr")
        assert [key.convert(word) for word in words] == [None] * len(words), key.name
        assert str not in key.kinds or key.choices or key.convert("0") == "0", key.name
    prompt = all_keys()["sample.prompt"]
    assert [prompt.convert(word) for word in ("none", "")] == ["none", ""]


# ---- run.toml ----


def round_trip(config, folder):
    file = folder / "run.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    return parse_arguments([str(file)])


def test_every_key_comes_back_from_run_toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a file from elsewhere may not name code
    values = {key: value for key, value in changed_values().items() if key != "checkpoint.out"}
    config, default = build_config(values), build_config({})
    assert all(value_of(config, key) != value_of(default, key) for key in values)
    assert round_trip(config, tmp_path) == config
    assert round_trip(default, tmp_path) == default
    text = to_toml(build_config({"checkpoint.out": "somewhere"}))
    assert "somewhere" not in text and read_toml(tmp_path / "run.toml").keys() == {*all_keys()} - {"checkpoint.out"}


def test_what_is_typed_overrides_the_file_and_the_file_the_preset(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text('preset = "small"\nsteps = 7\n[model]\nnum_layers = 3\n[optim]\nlr = 0.5\nbeta2 = 0.5\n')
    of_file = parse_arguments([str(file)])
    assert (of_file.model.num_layers, of_file.model.hidden_size) == (3, PRESETS["small"].hidden_size)
    assert (of_file.steps, of_file.optim.lr, of_file.optim.beta2, of_file.seed) == (7, 0.5, 0.5, 0)
    typed = parse_arguments([str(file), "--lr", "0.25", "--num-layers", "5", "--set", "seed=3"])
    assert (typed.model.num_layers, typed.model.hidden_size) == (5, PRESETS["small"].hidden_size)
    assert (typed.steps, typed.optim.lr, typed.optim.beta2, typed.seed) == (7, 0.25, 0.5, 3)
    assert parse_arguments([str(file), "--preset", "tiny"]).model == PRESETS["tiny"]  # no key of another model
    assert parse_arguments(["--preset", "small", "--num-layers", "3"]).model == of_file.model


def test_a_request_knows_what_was_typed_and_how_it_differs_from_the_resumed_run(tmp_path):
    old = {"optim.lr": 0.5, "steps": 6, "parallel.pp": 2, "metrics.profile": 3, "parallel.schedule": "a.csv"}
    config = build_config(old)
    (tmp_path / "run.toml").write_text(to_toml(config))
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    for resume in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step-000002"):
        more = [
            "--schedule",
            "b.csv",
            "--set",
            "compute.fp8=experts",
            "batch.replay_routes=c",
            "batch.special_tokens=true",
        ]
        request = parse(["--resume", str(resume), "--lr", "0.25", "--steps", "9", "--batch-size", "16", *more])
        other = {"parallel.schedule", "compute.fp8", "batch.replay_routes", "batch.special_tokens"}
        assert request.typed == {"optim.lr", "steps"} | other
        assert request.from_file and changes(request.saved or {}, request.config) == [
            "steps 6 -> 9; this changes the mathematics",
            "parallel.schedule 'a.csv' -> 'b.csv'; this changes the order of the work",
            "compute.fp8 'off' -> 'experts'; this changes the mathematics",
            "batch.special_tokens False -> True; this changes the data",
            "batch.replay_routes None -> 'c'; this changes the mathematics",
            "optim.lr 0.5 -> 0.25; this changes the mathematics",
        ]  # fmt: skip
        assert (request.config.parallel.pp, request.config.steps, request.config.metrics.profile) == (2, 9, 0)
    assert not parse(["--lr", "0.25"]).from_file


def started(*arguments):
    """Do a run on the command line. Returns what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main([*map(str, ("--device", "cpu", *arguments))])
    return printed.getvalue()


def test_the_run_toml_of_a_run_repeats_it_and_resume_continues_it_bit_for_bit(tmp_path):
    first = ("--steps", 4, "--out", tmp_path / "a", *SMALL, "--save-every", 2, "--lr", 0.01, "--seed", 5)
    started(*first, "--set", "optim.beta2=0.9", "model.router_bias=true", "bias_rate=0.01")
    expected = without_clocks(records(tmp_path / "a"))
    started(tmp_path / "a" / "run.toml", "--out", tmp_path / "b")
    assert without_clocks(records(tmp_path / "b")) == expected
    texts = [(tmp_path / name / "run.toml").read_text() for name in "ab"]
    assert texts[0] == texts[1] and "beta2 = 0.9" in texts[0]

    started(*first, "--set", "optim.beta2=0.9", "model.router_bias=true", "bias_rate=0.01", "--out", tmp_path / "c")
    for path in (tmp_path / "c" / "checkpoints").glob("step-000004*"):
        path.rename(tmp_path / "removed")
    printed = started("--resume", tmp_path / "c")
    assert "steps 3 to 4" in printed and "changed: " not in printed
    found = without_clocks(records(tmp_path / "c"))
    assert [one for one in found if "loss" in one] == [one for one in expected if "loss" in one]
    assert found[-1] == expected[-1] and "validation_loss" in found[-1]
    assert 'resume = "none"' in (tmp_path / "c" / "run.toml").read_text()  # where the run started, not where it goes on
    printed = started("--resume", tmp_path / "c", "--steps", 5, "--lr", 0.02)
    assert "changed: optim.lr 0.01 -> 0.02; this changes the mathematics\n" in printed


def test_a_resumed_run_says_which_of_its_inputs_is_another_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, layers, schedule = Path("text.txt"), Path("layers.py"), Path("schedule.csv")
    text.write_text("one line\n" * 400)
    layers.write_text("from tests.support.own_layers import Expert\n")
    schedule.write_text(build("1f1b", 1, 4).to_csv())
    arguments = ("--data", text, "--experts", "layers.py:Expert", "--schedule", schedule)
    started("--steps", 2, "--out", "run", *SMALL[:-2], *arguments)
    changes = {
        text: "two lines\n" * 400, layers: layers.read_text() + "# another\n", schedule: schedule.read_text() + "\n",
    }  # fmt: skip
    for file, content in changes.items():
        file.write_text(content)
    printed = started("--resume", "run", "--steps", 3)
    for name in ("the text of --data", "the file of --experts", "the file of --schedule"):
        assert f"changed: {name}, which is not what it was when the checkpoint was written\n" in printed


# ---- Files of strangers ----


@pytest.mark.parametrize("values,words", [
    ({"model.experts": "evil.py:X"}, "--experts evil.py:X"),
    ({"model.router": "evil:X", "model.block": "e v.py:X"}, "--router evil:X --block 'e v.py:X'"),
    ({"checkpoint.out": "/home/me"}, "--out /home/me"),
    ({"batch.record_routes": "/home/me"}, "--set batch.record_routes=/home/me"),
    ({"checkpoint.resume": "mine/checkpoints/step-000001"}, "--out mine"),
    ({"checkpoint.export": "a", "checkpoint.staging": "b", "metrics.wandb": "c"},
     "--export a --set checkpoint.staging=b --wandb c"),
], ids=str)  # fmt: skip
def test_code_and_outputs_that_a_file_from_elsewhere_names_must_be_typed(tmp_path, monkeypatch, values, words):
    monkeypatch.setitem(sys.modules, "evil", None)  # cannot be imported
    toml = to_toml(TrainConfig())
    for key, value in values.items():
        section, name = key.split(".")
        toml = re.sub(f"^{name} = .*\n", "", toml, flags=re.MULTILINE)
        toml = toml.replace(f"[{section}]\n", f'[{section}]\n{name} = "{value}"\n')
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here / "run", there):
        folder.mkdir(parents=True)
        (folder / "run.toml").write_text(toml)
    monkeypatch.chdir(here)
    commands = [[str(there / "run.toml")]]
    if not values.keys() & {"checkpoint.out", "checkpoint.resume", "checkpoint.export"}:  # a resume takes none of these
        commands.append(["--resume", "../there"])
    for command in commands:
        with pytest.raises(OptionError) as error:
            parse(command)
        text, _, typed = str(error.value).partition(": if you trust it, add ")
        assert text.endswith("there/run.toml is not in the current folder and names code or outputs")
        assert sorted(shlex.split(typed)) == sorted(shlex.split(words))
        found = parse([*command, *shlex.split(typed)]).config
        assert {key: value_of(found, key) for key in values} == values
    assert {key: value_of(parse(["run/run.toml"]).config, key) for key in values} == values
    assert words_to_resume(here / "run", found) == []
    kept = " ".join(words_to_resume(there, found))
    assert kept == words if len(commands) == 2 else kept == "--set checkpoint.staging=b --wandb c" or not kept


# ---- Values for a launch ----


def test_auto_uses_gpus_if_there_is_one_per_process(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Unheard-of")
    for processes, device, dtype in [(2, "cuda", torch.bfloat16), (4, "cpu", torch.float32)]:
        run = make_run(TrainConfig(), 0, processes)
        assert (run.device.type, run.numerics.dtype) == (device, dtype)
    with pytest.raises(ValueError, match="4 processes and 2 GPUs here: start at most 2 processes, or use --device cpu"):
        make_run(options(device="cuda"), 0, 4)


NUMERIC = {name: key.kinds[0] for name, key in all_keys().items() if key.kinds[0] in (int, float)}
FLOATS = sorted(name for name, type_ in NUMERIC.items() if type_ is float)
INTEGERS = sorted({*NUMERIC} - {*FLOATS})


def outcome(name, value):
    """The error for this value, or "": checks the options, chooses a layout, and divides the layers."""
    try:
        config = build_config({name: value})
        check_options(config)
        config.sample.sampling()
        split(config.model, choose(config, 1).schedule.num_stages)
    except ValueError as error:
        return str(error)
    return ""


def shown_name(name):
    """How errors name the key."""
    return name.removeprefix("model.") if name.startswith("model.") else option_name(name)


def accepting(names, value):
    """The keys that accept `value`. The errors of the others must be short, name the option and show the value."""
    accepted = set()
    for name in names:
        error = outcome(name, value)
        if not error:
            accepted.add(name)
            continue
        assert shown_name(name).rpartition(".")[2] in error or "chunks" in error, error
        assert "\n" not in error and len(error) < 250, error
    return accepted


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, -1e308, 1e308, 1e300, 1e14])
def test_no_float_option_accepts_a_number_without_sense(value):
    assert accepting(FLOATS, value) == set()


@pytest.mark.parametrize("value", [-(10**30), -(2**63) - 1, 2**63, 2**64, 10**30, 10**400])
def test_no_integer_option_accepts_a_number_beyond_64_bits(value):
    assert accepting(INTEGERS, value) == set()


@pytest.mark.parametrize("names,low,high", [
    *RANGES, *((" ".join(f"model.{name}" for name in names.split()), low, high)
               for names, low, high in model_config._RANGES),
])  # fmt: skip
def test_the_bounds_are_valid_and_numbers_outside_are_not(names, low, high):
    for key in names.split():
        integer = key in INTEGERS
        below, above = (low - 1, high + 1) if integer else (math.nextafter(low, -1), math.nextafter(high, math.inf))
        for value, refused in ((below, "at least"), (low, ""), (high, ""), (above, "at most")):
            try:
                check_options(build_config({key: value}))
                error = ""
            except ValueError as caught:
                error = str(caught)
            # A bound may conflict with other options, such as 1 query head with 2 key and value heads.
            found = re.match(rf"{shown_name(key)} must be (at least|at most) [\d.,e+-]+: got ", error)
            assert (found[1] if found else "") == refused, error


# ---- Types: a program may give anything ----


@pytest.mark.parametrize("config,line", [
    (lambda: options(steps=3.0), "--steps must be a whole number: got 3.0"),
    (lambda: options(steps="3"), "--steps must be a whole number: got '3'"),
    (lambda: options(steps=True), "--steps must be a whole number: got True"),
    (lambda: options(steps=np.int64(3)), "--steps must be a whole number: got np.int64(3)"),
    (lambda: options(seed=None), "--seed must be a whole number: got None"),
    (lambda: options(timeout=np.float32(3)), "--timeout must be a number: got np.float32(3.0)"),
    (lambda: options(peak_tflops="1"), "metrics.peak_tflops must be a number: got '1'"),
    (lambda: options(fused_loss="false"), "--fused-loss must be true or false: got 'false'"),
    (lambda: options(zero=1), "parallel.zero must be true or false: got 1"),
    (lambda: options(overlap="no"), "parallel.overlap must be true or false: got 'no'"),
    (lambda: options(compile=True), "unknown --compile 'True'; choose from: auto, on, off, whole"),
    (lambda: options(dtype=torch.bfloat16), "unknown --dtype 'torch.bfloat16'; did you mean 'bfloat16'? Choose from"),
    (lambda: options(data="notes.md"), "--data must be a list of texts: got 'notes.md'"),
    (lambda: options(data=Path("notes.md")), "--data must be a list of texts: got PosixPath('notes.md')"),
    (lambda: options(data=(Path("notes.md"),)), "--data must be a list of texts: got (PosixPath('notes.md'),)"),
    (lambda: options(out=Path("runs")), "--out must be text: got PosixPath('runs')"),
    (lambda: options(freeze=(1,)), "--freeze must be a list of texts: got (1,)"),
    (lambda: options(prompt=b"a"), "--prompt must be text: got b'a'"),
    (lambda: TrainConfig(model="tiny"), "model must be a ModelConfig: got 'tiny'"),
    (lambda: TrainConfig(compute={"dtype": "auto"}), "compute must be a ComputeConfig: got {'dtype': 'auto'}"),
    (lambda: ModelConfig(num_layers="3"), "num_layers must be a whole number: got '3'"),
    (lambda: ModelConfig(hidden_size=32.0), "hidden_size must be a whole number: got 32.0"),
    (lambda: ModelConfig(router_bias="yes"), "router_bias must be true or false: got 'yes'"),
])  # fmt: skip
def test_a_value_of_another_type_is_one_line(config, line):
    with pytest.raises(ValueError) as error:
        check_options(config())
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


@pytest.mark.parametrize("words,saved,chosen", [
    ("", None, ("muon", 0.015)), ("--optimizer adamw", None, ("adamw", 0.003)), ("--lr 0.5", None, ("muon", 0.5)),
    ("--lora 2", None, ("adamw", 0.003)), ("--lora 2 --optimizer muon", None, ("muon", 0.015)),
    ("", {"optim.name": "adamw"}, ("adamw", 0.003)), ("--optimizer muon", {"optim.name": "adamw"}, ("muon", 0.015)),
])  # fmt: skip
def test_the_optimizer_follows_from_what_is_trained(words, saved, chosen):
    optim = chosen_optimizer(Request(parse_arguments(words.split()), saved=saved), NOTHING_GIVEN)
    assert (optim.name, optim.lr) == chosen
    given = chosen_optimizer(Request(TrainConfig()), Given(weights={"weight": torch.zeros(1)}))
    assert (given.name, given.lr) == ("adamw", 0.003)
