"""The driver of the random attacks, with attacks of its own."""

import sys

import pytest

from tests.soak import __main__ as soak
from tests.soak.attack import Attack, repeat


def even(rng, folder):
    assert not [*folder.iterdir()]
    (folder / "file").write_text("")
    if rng.randrange(2):
        raise AssertionError("odd")


def test_every_try_repeats_alone():
    attack = Attack("even numbers", "are even", 20, even)
    whole, other = (repeat(attack, seed, range(20)) for seed in (0, 1))
    assert whole.tried == 20 and 0 < len(whole.failures) < 20
    assert other.failures.keys() != whole.failures.keys()
    for number in range(20):
        alone = repeat(attack, 0, range(number, number + 1))
        assert alone.failures == {n: text for n, text in whole.failures.items() if n == number}


def test_a_promise_that_does_not_hold_is_in_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(soak, "ATTACKS", (Attack("even numbers", "are even", 9, even),))
    monkeypatch.setattr(sys, "argv", ["soak"])
    with pytest.raises(SystemExit, match="1"):
        soak.main()
    printed = capsys.readouterr().out
    assert "try " in printed and "AssertionError: odd" in printed and "| even numbers | are even | 9 | " in printed
    monkeypatch.setattr(sys, "argv", ["soak", "--tries", "0"])
    with pytest.raises(SystemExit, match="0"):
        soak.main()
