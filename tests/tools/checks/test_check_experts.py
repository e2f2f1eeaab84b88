"""The checks of expert layers: each mistake is found by the law that it breaks, and correct layers pass."""

import dataclasses

import pytest

from moe_dualpipe.kernels.grouped_gemm import grouped_linear
from moe_dualpipe.tools.checks import check_experts
from moe_dualpipe.tools.checks.layers import SMALL
from moe_dualpipe.tools.checks.report import Report
from tests.support import broken_experts as broken
from tests.support import own_layers, special_experts

GRADIENTS = "parameters get gradients"
BROKEN = [
    ("OnlyManyExperts", "constructor", "OnlyManyExperts.__init__: RuntimeError: this layer needs two experts"),
    ("NeedsAllExpertsOrOne", "constructor", "RuntimeError: this layer cannot be divided"),
    ("ReturnsATuple", "rows in, rows out", "got tuple"),
    ("ReturnsFp32", "rows in, rows out", "got torch.float32. End forward with `y.to(x.dtype)`"),
    ("ReturnsFp32InBf16", "rows in, rows out", "[14, 16] in torch.bfloat16, like its input: got torch.float32"),
    ("OverflowsInFp32", "rows in, rows out", "NaN or infinity at row 0 of expert 0, in torch.float32"),
    ("ChangesItsInput", "input not written", "changes its input in place, first at row"),
    ("AddsNoise", "deterministic", "forward draws random numbers in eval mode, too"),
    ("CountsCalls", "deterministic", "two calls with the same input differ by"),
    ("RemembersTheFirstInput", "no state", "a call changes the result of a later call"),
    ("ForgetsTheLastExpert", GRADIENTS, "of expert 3 gets no gradient (like 1 other weight): the result does"),
    ("HasACapacity", "rows independent", "with [3, 2, 5, 4] rows per expert, row 4 of expert 2 has a relative"),
    ("SubtractsTheMean", "rows independent", "with [3, 2, 5, 4] rows per expert, row"),
    ("DependsOnThePosition", "rows independent", "not on the position of the row"),
    ("NeedsARow", "rows independent", "(with [1, 0, 0, 0] rows per expert)"),
    ("NeedsSomeRows", "rows independent", "(with [0, 0, 0, 0] rows per expert)"),
    ("HasALargeCapacity", "rows independent", "with [7, 0, 0, 0] rows per expert, row 6 of expert 0"),
    ("UsesTheNextExpert", "any ep equals ep=1", "the result differs by"),
    ("HoldsAllExperts", "any ep equals ep=1", "All experts share down, up"),
    ("HasABiasOnTwoRanks", "saved and loaded", "ep=2 has the tensor bias.0"),
    ("IsWiderOnTwoRanks", "saved and loaded", "up.0 has the shape [12, 16] with ep=1, and [24, 16] with ep=2"),
    ("PlainTensor", "saved and loaded", "not in its state_dict()"),
    ("CutsOffAWeight", GRADIENTS, "down of expert 0 gets no gradient (like 3 other weights), although"),
    ("HasAnUnusedWeight", GRADIENTS, "bias of expert 0 gets no gradient (like 3 other weights): the result does"),
    ("TrainsOneExpertLess", GRADIENTS, "up of expert 2 gets no gradient (like 1 other weight), although"),
    ("DoublesAGradient", "gradients", "the gradient of down of expert 0 is wrong"),
    ("CutsOffTheInput", "gradients", "the input gets no gradient"),
    ("DoublesAGradientInParts", "any ep equals ep=1", "down of expert 0 differs by 1.0e+00 (about 2 times"),
    ("DoublesTheInputGradientInParts", "any ep equals ep=1", "gradient of the input differs by 1.0e+00 (about 2"),
    ("DefersTwice", "split backward", "differs by 1.0e+00 (about 2 times as large) if weight gradients are deferred"),
    ("KeepsItsInput", "overlapped equals sequential", "keeps tensors for later in `self`"),
    ("IgnoresTheWeights", "choices of a row", "differs by"),
    ("DetachesTheWeights", "choices of a row", "the gradient of weights_NK differs by 1.0e+00"),
]  # fmt: skip


def failed(report: Report) -> list[str]:
    return [check.name for check in report.checks if check.status == "failed"]


def skipped(report: Report) -> list[str]:
    return [check.name for check in report.checks if check.status == "skipped"]


@pytest.mark.parametrize("name,law,words", BROKEN, ids=[name for name, _, _ in BROKEN])
def test_each_mistake_is_found_by_one_law(name, law, words):
    report = check_experts(getattr(broken, name))
    assert failed(report) == [law], str(report)
    (problem,) = (check.problem for check in report.checks if check.status == "failed")
    assert words in problem and problem.count("broken_experts.py:") == 1


@pytest.mark.parametrize("layer", [
    "swiglu", broken.GELUExperts, broken.RoundsToFp32, own_layers.Expert, own_layers.VariedExpert,
    own_layers.expert_list, own_layers.swiglu_function,
], ids=lambda layer: getattr(layer, "__name__", layer))  # fmt: skip
def test_correct_layers_pass(layer):
    report = check_experts(layer)
    assert report.passed, str(report)
    assert skipped(report) == ([] if layer == "swiglu" else ["choices of a row"])
    warnings = [check.problem for check in report.checks if check.status == "warning"]
    assert [*map(bool, warnings)] == ([] if layer == "swiglu" else [True])
    assert all("tolist() at " in warning for warning in warnings)


def test_the_gradients_of_what_all_experts_share_are_summed():
    report = check_experts(broken.SharesAScale)
    assert report.passed and skipped(report) == ["choices of a row"], str(report)


def test_an_odd_number_of_experts_is_divided():
    config = dataclasses.replace(SMALL, num_experts=3)
    report = check_experts(broken.GELUExperts, config=config)
    assert report.passed and skipped(report) == ["choices of a row"], str(report)
    assert failed(check_experts(broken.UsesTheNextExpert, config=config)) == ["any ep equals ep=1"]


class Running(special_experts.RunningExperts):
    """Without dropout, and it moves the mean after its use."""

    def forward(self, x_MD, expert_offsets):
        training, mean_ED = self.training, self.mean.repeat_interleave(expert_offsets.diff(), 0)
        y_MD = grouped_linear(x_MD - mean_ED, self.up, expert_offsets)
        if training or self.always:
            self.move([piece.detach() for piece in x_MD.split(expert_offsets.diff().tolist())])
        return y_MD

    always = False


class MovesInEval(Running):
    always = True


class Undeclared(Running):
    averaged_buffers = ()


def test_averaged_buffers_may_change_in_training_only():
    report = check_experts(Running)
    assert report.passed and skipped(report) == ["choices of a row"], str(report)
    assert "two calls are bit-equal; other checks use eval mode" in str(report)
    assert failed(check_experts(Undeclared)) == ["deterministic"]
    assert failed(check_experts(MovesInEval)) == ["no state"]
    with_dropout = check_experts(special_experts.RunningExperts)
    assert with_dropout.passed and skipped(with_dropout)[0] == "deterministic"


def test_dropout_is_off_from_the_law_that_finds_it():
    report = check_experts(special_experts.DropoutExperts)
    assert report.passed and skipped(report) == ["deterministic"], str(report)
