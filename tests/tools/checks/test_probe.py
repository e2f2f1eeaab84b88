"""The probe sees every segment, and changes no result."""

from collections import Counter
from contextlib import ExitStack

import pytest

from moe_dualpipe.tools.checks.probe import probe
from tests.support.pairs import assert_same, run_pair, stage, tokens


def probed_pair(recompute, overlapped, observe):
    first, second = stage(3, recompute=recompute), stage(3, seed=1, recompute=recompute)
    with ExitStack() as probes:
        for module in (first, second) if observe else ():
            probes.enter_context(probe(module, observe))
        results = run_pair(first, second, tokens(1), tokens(2), overlapped)
    assert "segments" not in vars(first)
    return results


@pytest.mark.parametrize("recompute,overlapped", [("none", True), ("full", True), ("norms", False)])
def test_a_probe_sees_all_tensors_and_gradients_and_changes_no_result(recompute, overlapped):
    seen: Counter[str] = Counter()
    results = probed_pair(recompute, overlapped, lambda at, _: seen.update([f"{at.segment}: {at}"]))
    assert_same(results, probed_pair(recompute, overlapped, None))
    segments = {text.split(" is that of ")[1] for text in seen}
    assert segments == {
        "segment embed", "segment head", *(f"layer {i}, segment {name}" for i in range(3) for name in ("attn", "mlp")),
        *(f"layer {i}, segment {name}" for i in (1, 2) for name in ("prepare dispatch", "dispatch", "combine")),
    }  # fmt: skip
    kinds = {text.split(": ")[1].split(" is that")[0] for text in seen}
    assert kinds == {"input", "output", "input gradient", "output gradient"}
    # The residual stream is an input of attention and of the experts' sum: each use has its own gradient.
    assert seen["1: input gradient is that of layer 0, segment attn"] == 2  # two micro-batches
    for kind in ("input", "output", "input gradient", "output gradient"):
        assert sum(n for text, n in seen.items() if f": {kind} is that of layer 1, segment combine" in text) == 2
