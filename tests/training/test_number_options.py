"""Every option of train.py that is a number, with numbers that make no sense: each is refused in one line."""

import dataclasses
import math
import re

import pytest

from moe_dualpipe.models import config as model_config
from moe_dualpipe.models import split
from moe_dualpipe.training.checks import RANGES, check_options
from moe_dualpipe.training.config import TrainConfig
from moe_dualpipe.training.options import parse_arguments
from tests.support.runs import change, make_run, option_values

NUMBERS = {
    flag: type_
    for flag, value in option_values(TrainConfig()).items()
    if (type_ := type(value)) in (int, float) or flag in {
        *("pp", "nodes-per-domain", "num-chunks", "max-deferred", "micro-batches", "save-every", "eval-every"),
        *("move-experts-every", "elastic", "top-k", "peak-tflops", "optim.decay-steps"),
    }
}  # fmt: skip
FLOATS = sorted(flag for flag, type_ in NUMBERS.items() if type_ is float or flag == "peak-tflops")
INTEGERS = sorted({*NUMBERS} - {*FLOATS})


def with_option(flag, value):
    """The default options with another value of one flag."""
    group, _, name = flag.replace("-", "_").rpartition(".")
    if not group:
        return change(TrainConfig(), **{name: value})
    inner = dataclasses.replace(getattr(TrainConfig(), group), **{name: value})
    return dataclasses.replace(TrainConfig(), **{group: inner})


def outcome(flag, value):
    """The error for this value, or "": checks the options, chooses the values of a launch, and divides the layers."""
    try:
        config = with_option(flag, value)
        split(config.model, make_run(config).schedule.num_stages)
    except ValueError as error:
        return str(error)
    return ""


def accepting(flags, value):
    """The flags that accept `value`. The errors of the others must be short, name the option and show the value."""
    accepted = set()
    for flag in flags:
        error = outcome(flag, value)
        if not error:
            accepted.add(flag)
            continue
        name = flag.removeprefix("model.").replace("-", "_") if flag.startswith("model.") else f"--{flag}"
        assert name.removeprefix("--").replace("-", "_") in error.replace("-", "_") or "chunks" in error, error
        assert "\n" not in error and len(error) < 250, error
    return accepted


def test_every_number_is_tested():
    assert {"seed", "steps", "pp", "top-k", "optim.decay-steps", "model.num-layers"} <= {*INTEGERS}
    assert {"optim.clip", "peak-tflops", "timeout", "temperature", "model.rope-theta"} <= {*FLOATS}
    assert len(INTEGERS) + len(FLOATS) == 72


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, -1e308, 1e308, 1e300, 1e14])
def test_no_float_option_accepts_a_number_without_sense(value):
    assert accepting(FLOATS, value) == set()


def test_the_float_options_that_accept_0():
    assert accepting(FLOATS, 0.0) == {
        *("bias-rate", "temperature", "optim.final-lr", "optim.beta1", "optim.beta2", "optim.momentum"),
        *("move-experts-gain",),
        *("optim.weight-decay", "model.sequence-loss", "model.z-loss", "model.mtp-weight", "model.norm-eps"),
        *("model.latent-norm-eps", "model.yarn-mscale", "model.yarn-mscale-all-dim"),
    }  # fmt: skip


@pytest.mark.parametrize("value", [-(10**30), -(2**63) - 1, 2**63, 2**64, 10**30, 10**400])
def test_no_integer_option_accepts_a_number_beyond_64_bits(value):
    assert accepting(INTEGERS, value) == set()


def test_the_integer_options_that_accept_unusual_numbers():
    assert accepting(INTEGERS, -1) == accepting(INTEGERS, 2**31) == accepting(INTEGERS, 2**63 - 1) == {"seed"}
    assert accepting(INTEGERS, 0) == {
        *("seed", "profile", "sample-tokens", "optim.warmup-steps"),
        *("model.q-rank", "model.num-dense-layers", "model.num-shared-experts", "model.mtp-layers"),
    }  # fmt: skip


@pytest.mark.parametrize("options,low,high", [
    *((" ".join(option.split(".")[-1] if "optim." not in option else option for option in options.split()), low, high)
      for options, low, high in RANGES),
    *((" ".join(f"model.{name}" for name in names.split()), low, high) for names, low, high in model_config._RANGES),
])  # fmt: skip
def test_the_bounds_are_valid_and_numbers_outside_are_not(options, low, high):
    for flag in options.replace("_", "-").split():
        name = flag.removeprefix("model.").replace("-", "_") if flag.startswith("model.") else f"--{flag}"
        integer = flag in INTEGERS
        below, above = (low - 1, high + 1) if integer else (math.nextafter(low, -1), math.nextafter(high, math.inf))
        for value, refused in ((below, "at least"), (low, ""), (high, ""), (above, "at most")):
            try:
                check_options(with_option(flag, value))
                error = ""
            except ValueError as caught:
                error = str(caught)
            # A bound may conflict with other options, such as 1 query head with 2 key and value heads.
            found = re.match(rf"{name} must be (at least|at most) [\d.,e+-]+: got ", error)
            assert (found[1] if found else "") == refused, error


@pytest.mark.parametrize("arguments,message", [
    (["--seed", str(2**64)], "--seed must be at most 9,223,372,036,854,775,807: got 18446744073709551616"),
    (["--timeout", "1e14"], "--timeout must be at most 1,000,000: got 100000000000000.0"),
    (["--timeout", "1e-9"], "--timeout must be at least 1: got 1e-09"),
    (["--clip", "inf"], "--clip must be at most 1e+06: got inf"),
    (["--model.num-layers", "2147483648"], "num_layers must be at most 10,000: got 2147483648"),
    (["--model.rope-theta", "0"], "rope_theta must be at least 1: got 0.0"),
    (["--micro-batches", "2147483647"],
     "a schedule can have at most 524,288 chunks, one for each micro-batch and stage: got 2,147,483,647 micro-batches "
     "on 2 stages; use fewer"),
    (["--temperature", "nan"], "temperature must be at least 0: got nan"),
    (["--data", "stdlib=1e308"], "--data stdlib=1e308: the weight must be at most 1e+09: got 1e+308"),
])  # fmt: skip
def test_messages(arguments, message):
    from moe_dualpipe.data import load_data

    with pytest.raises(ValueError) as error:
        config = parse_arguments(["--device", "cpu", *arguments])
        make_run(config)
        load_data(config.batch.data, 32)
    assert str(error.value).startswith(message)
