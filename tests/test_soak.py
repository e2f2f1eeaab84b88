"""The driver of the random attacks, with attacks of its own."""

import sys

import pytest

from tests.soak import __main__ as soak
from tests.soak.attack import Attack, UnableError, repeat, table


def even(rng, folder):
    assert not [*folder.iterdir()]
    (folder / "file").write_text("")
    if rng.randrange(2):
        raise AssertionError("odd")


def unable(_rng, _folder):
    raise UnableError("needs root")


def test_every_try_repeats_alone():
    attack = Attack("even numbers", "are even", 20, (even,))
    whole = repeat(attack, 0, range(20), report=lambda _: None)
    assert (whole.tried, whole.held) == (20, 20 - len(whole.failures)) and 0 < whole.held < 20
    for number in range(20):
        alone = repeat(attack, 0, range(number, number + 1), report=lambda _: None)
        assert alone.failures == {n: text for n, text in whole.failures.items() if n == number}
    other = repeat(attack, 1, range(20), report=lambda _: None)
    assert other.failures.keys() != whole.failures.keys()


def test_runs_take_turns_and_an_attack_that_cannot_run_says_why():
    outcome = repeat(Attack("turns", "hold", 5, (even, unable)), 0, range(5), report=lambda _: None)
    assert outcome.unable == "needs root" and outcome.tried == 1
    assert "| turns | hold | not run: needs root | | | 0.0 |" in table([outcome])


def test_a_promise_that_does_not_hold_is_in_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(soak, "ATTACKS", (Attack("even numbers", "are even", 9, (even,)),))
    monkeypatch.setattr(sys, "argv", ["soak"])
    with pytest.raises(SystemExit, match="1"):
        soak.main()
    printed = capsys.readouterr().out
    assert "try " in printed and "AssertionError: odd" in printed and "| even numbers | are even | 9 | " in printed
    monkeypatch.setattr(sys, "argv", ["soak", "--tries", "0"])
    with pytest.raises(SystemExit, match="0"):
        soak.main()
