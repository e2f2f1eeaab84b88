"""The checks of expert layers: each mistake is found by the law that it breaks, and correct layers pass."""

import pytest

from moe_dualpipe.testing import check_experts
from moe_dualpipe.testing.report import Report
from tests.support import broken_experts as broken
from tests.support import own_layers

GRADIENTS = "parameters get gradients"
BROKEN = [
    ("OnlyManyExperts", "constructor", "OnlyManyExperts.__init__: RuntimeError: this layer needs two experts"),
    ("ReturnsATuple", "rows in, rows out", "got tuple"),
    ("ReturnsFp32", "rows in, rows out", "got torch.float32. End forward with `y.to(x.dtype)`"),
    ("ChangesItsInput", "input not written", "changes its input in place, first at row"),
    ("AddsNoise", "deterministic", "forward draws random numbers in eval mode, too"),
    ("CountsCalls", "deterministic", "two calls with the same input differ by"),
    ("RemembersTheFirstInput", "no state", "a call changes the result of a later call"),
    ("ForgetsTheLastExpert", "all rows used", "row 0 of expert 3 (of 4) does not depend on the row"),
    ("HasACapacity", "all rows used", "row 4 of expert 2 (of 5) does not depend on the row: it is 0"),
    ("SubtractsTheMean", "rows independent", "if the rows of expert 0 change"),
    ("DependsOnThePosition", "row order", "if the rows of each expert are reversed"),
    ("NeedsARow", "any number of rows", "(with [1, 0, 0, 0] rows per expert)"),
    ("UsesTheNextExpert", "each expert alone", "expert 0 gives different results in a layer with all experts"),
    ("HoldsAllExperts", "each expert alone", "All experts share down, up."),
    ("PlainTensor", "saved and loaded", "not in its state_dict()"),
    ("CutsOffAWeight", GRADIENTS, "down of expert 0 gets no gradient (like 3 other weights), although"),
    ("HasAnUnusedWeight", GRADIENTS, "bias of expert 0 gets no gradient (like 3 other weights): the result does"),
    ("TrainsOneExpertLess", GRADIENTS, "up of expert 2 gets no gradient (like 1 other weight), although"),
    ("DoublesAGradient", "gradients", "the gradient of down of expert 0 is wrong"),
    ("CutsOffTheInput", "gradients", "the input gets no gradient"),
    ("DoublesAGradientInParts", "ep=2 equals ep=1", "down of expert 0 differs by 1.0e+00 on rank 0"),
    ("DefersTwice", "split backward", "differs by 1.0e+00 (about 2 times as large) if weight gradients are deferred"),
    ("KeepsItsInput", "overlapped equals sequential", "keeps tensors for later in `self`"),
    ("IgnoresTheWeights", "choices of a row", "differs by"),
]  # fmt: skip


def failed(report: Report) -> list[str]:
    return [check.name for check in report.checks if check.status == "failed"]


@pytest.mark.parametrize("name,law,words", BROKEN, ids=[name for name, _, _ in BROKEN])
def test_each_mistake_is_found_by_one_law(name, law, words):
    report = check_experts(getattr(broken, name))
    assert failed(report) == [law], str(report)
    (problem,) = (check.problem for check in report.checks if check.status == "failed")
    assert words in problem and problem.count("broken_experts.py:") == 1


@pytest.mark.parametrize("layer", [
    "swiglu", broken.GELUExperts, own_layers.Expert, own_layers.VariedExpert, own_layers.expert_list,
    own_layers.swiglu_function,
], ids=lambda layer: getattr(layer, "__name__", layer))  # fmt: skip
def test_correct_layers_pass(layer):
    report = check_experts(layer)
    assert report.passed, str(report)
    skipped = [check.name for check in report.checks if check.status == "skipped"]
    assert skipped == ([] if layer == "swiglu" else ["choices of a row"])
    warnings = [check.problem for check in report.checks if check.status == "warning"]
    assert [*map(bool, warnings)] == ([] if layer == "swiglu" else [True])
    assert all("tolist() at " in warning for warning in warnings)
