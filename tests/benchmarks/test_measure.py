"""How the GPU suite times."""

import itertools

import torch

from benchmarks.gpu.measure import Clock, time_interleaved


def test_cases_are_interleaved_the_first_call_of_each_turn_is_not_timed_and_one_that_raises_does_not_stop_the_others():
    calls, clock = [], Clock(torch.device("cpu"))
    clock.mark = itertools.count().__next__  # every mark is one second after the previous one

    def case(name, phases, fails=False):
        def run(end_phase):
            calls.append(name)
            if fails:
                raise ValueError("first line\nsecond line")
            for _ in range(phases):
                end_phase()

        return run

    cases = {"a": case("a", 1), "b": case("b", 3), "bad": case("-", 1, fails=True)}
    times = time_interleaved(clock, cases, rounds=2, repeats=2)
    assert "".join(calls).replace("-", "") == "aaabbb" * 2
    assert times.seconds == {"a": [[1.0] * 4], "b": [[1.0] * 4] * 3}
    assert times.failures == {"bad": "ValueError: first line"}
