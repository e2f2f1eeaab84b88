"""Every option of train.py that is a number, with numbers that make no sense: each is refused in one line."""

import math
import re

import pytest

from moe_dualpipe.models import config as model_config
from moe_dualpipe.models import split
from moe_dualpipe.training.checks import RANGES, check_options
from moe_dualpipe.training.layout_choice import choose
from moe_dualpipe.training.options import all_keys, build_config, option_name

NUMBERS = {name: key.kinds[0] for name, key in all_keys().items() if key.kinds[0] in (int, float)}
FLOATS = sorted(name for name, type_ in NUMBERS.items() if type_ is float)
INTEGERS = sorted({*NUMBERS} - {*FLOATS})


def with_option(name, value):
    """The default options with another value of one key."""
    return build_config({name: value})


def outcome(name, value):
    """The error for this value, or "": checks the options, chooses a layout, and divides the layers."""
    try:
        config = with_option(name, value)
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


def test_the_integer_options_that_accept_unusual_numbers():
    assert accepting(INTEGERS, -1) == accepting(INTEGERS, 2**31) == accepting(INTEGERS, 2**63 - 1) == {"seed"}
    assert accepting(INTEGERS, 0) == {
        *("seed", "metrics.profile", "sample.sample_tokens", "optim.warmup_steps"),
        *("model.q_rank", "model.num_dense_layers", "model.num_shared_experts", "model.mtp_layers"),
    }  # fmt: skip


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
                check_options(with_option(key, value))
                error = ""
            except ValueError as caught:
                error = str(caught)
            # A bound may conflict with other options, such as 1 query head with 2 key and value heads.
            found = re.match(rf"{shown_name(key)} must be (at least|at most) [\d.,e+-]+: got ", error)
            assert (found[1] if found else "") == refused, error
