"""The checks of routers, attention and blocks: each mistake is found by the law that it breaks."""

from functools import partial

import pytest

from moe_dualpipe.models import ModelConfig
from moe_dualpipe.overlap import Segmented
from moe_dualpipe.tools.checks import Report, check_attention, check_block, check_router
from tests.support import broken_routers, broken_sequences, own_layers

GRADIENTS = "parameters get gradients"


def by_status(report: Report, status: str) -> list[str]:
    return [check.name for check in report.checks if check.status == status]


def assert_found(report: Report, law: str, words: str, file: str) -> None:
    assert by_status(report, "failed") == [law], str(report)
    (problem,) = (check.problem for check in report.checks if check.status == "failed")
    assert words in problem and f"{file}:" in problem


@pytest.mark.parametrize("name,law,words", [
    ("OnlyIds", "weights and ids", "must return weights_TK and ids_TK: got Tensor"),
    ("WeightsInBf16", "weights and ids", "must be in fp32 or fp64: got torch.bfloat16"),
    ("IdsInInt32", "weights and ids", "ids must be int64: got torch.int32"),
    ("KeepsTheSequences", "weights and ids", "must both be [24, K]: got [4, 6, 2] and [4, 6, 2]"),
    ("DividesByZero", "weights and ids", "is not finite, in torch.float64: [nan, nan]"),
    ("NeedsTwoDimensions", "weights and ids", "shapes cannot be multiplied (1x96 and 16x4)"),
    ("SkipsWithInfinity", "weights and ids", "The weight of id -1 must be finite, too"),
    ("CountsFromOne", "ids valid", "chooses expert 4: ids are global, from 0 to 3"),
    ("ChoosesTwice", "ids valid", "more than once"),
    ("HidesSkips", "ids valid", "ids are -1, but skips_choices is False"),
    ("DrawsExperts", "deterministic", "forward draws random numbers in eval mode"),
    ("BalancesInForward", "deterministic", "two calls with the same input differ"),
    ("FixedWeights", GRADIENTS, "score.weight gets no gradient (like 1 other weight), although"),
    ("Straight", "gradients", "the gradient of the input is wrong"),
    ("KeepsAPlainTensor", "saved and loaded", "not in its state_dict()"),
], ids=lambda text: text if text.isidentifier() else "")  # fmt: skip
def test_each_mistake_of_a_router_is_found(name, law, words):
    assert_found(check_router(getattr(broken_routers, name)), law, words, "broken_routers.py")


@pytest.mark.parametrize("router", [
    "topk", own_layers.PlainRouter, broken_routers.TopK, broken_routers.WithALoss, broken_routers.Hash,
    broken_routers.SkipsWithConstants,
])  # fmt: skip
def test_correct_routers_pass(router):
    report = check_router(router)
    assert report.passed and not by_status(report, "warning"), str(report)
    assert by_status(report, "skipped") == (["split backward"] if router is broken_routers.Hash else [])


def test_routers_that_depend_on_other_tokens_get_a_warning():
    report = check_router(broken_routers.ExpertChoice)
    assert report.passed and by_status(report, "warning") == ["tokens independent"], str(report)
    assert "choices depend on other tokens of the batch: token" in str(report)


@pytest.mark.parametrize("name,law,words", [
    ("DropsAPosition", "sequences in, sequences out", "got [3, 7, 16]"),
    ("NeedsTwoPositions", "sequences in, sequences out", "got [3, 0, 16]"),
    ("NormalizesOnAverage", "deterministic", "differ by"),
    ("MixesSequences", "sequences independent", "of sequence 0 changes by"),
    ("SeesTheFuture", "causal", "it sees later tokens"),
    ("CountsTheLength", "generation", "with 3 new positions after 0"),
    ("ForgetsThePast", "generation", "with 1 new position after 3. Append the new keys"),
    ("IgnoresTheMask", "document mask", "the mask mask_B1SS is not used"),
    ("NeverTrains", GRADIENTS, "gate gets no gradient, although the result depends on it"),
    ("UsesTheMaskBothWays", "document mask", "with a mask of one document, position "),
], ids=lambda text: text if text.isidentifier() else "")  # fmt: skip
def test_each_mistake_of_attention_is_found(name, law, words):
    assert_found(check_attention(getattr(broken_sequences, name)), law, words, "broken_sequences.py")


@pytest.mark.parametrize("attention,skipped", [
    ("gqa", []), ("mla", []), (own_layers.WithCache, []), (own_layers.WithoutCache, ["document mask"]),
    (broken_sequences.WithDropout, ["deterministic", "document mask"]),
])  # fmt: skip
def test_correct_attention_passes(attention, skipped):
    report = check_attention(attention)
    assert report.passed and by_status(report, "skipped") == skipped, str(report)


@pytest.mark.parametrize("name,law,words", [
    ("AddsTwiceInPlace", "input not written", "first at position 0 of sequence 0"),
    ("CutsOffTheResidual", GRADIENTS, "attention.qkv.weight gets no gradient (like 1 other weight), although"),
    ("KeepsItsAttention", "overlapped equals sequential", "overwrites them"),
], ids=lambda text: text if text.isidentifier() else "")  # fmt: skip
def test_each_mistake_of_a_block_is_found(name, law, words):
    assert_found(check_block(getattr(broken_sequences, name)), law, words, "broken_sequences.py")


@pytest.mark.parametrize("check", [
    partial(check_block, "prenorm"), partial(check_block, own_layers.ParallelBlock),
    partial(check_block, own_layers.PlainBlock, "factor=0.5"),
], ids=["prenorm", "parallel", "plain"])  # fmt: skip
def test_correct_blocks_pass(check):
    report = check()
    assert report.passed, str(report)


def test_other_sizes():
    config = ModelConfig(hidden_size=10, num_heads=2, num_kv_heads=1, head_dim=4, num_experts=3)
    assert "of expert 2" not in str(report := check_block("prenorm", config=config)) and report.passed


def test_both_overlapped_ways_are_compared(monkeypatch):
    calls = []
    for name in ("overlapped_forward_backward", "interleaved_forward"):
        method = getattr(Segmented, name)
        called = partial(lambda name, method, *args: calls.append(name) or method(*args), name, method)
        monkeypatch.setattr(Segmented, name, staticmethod(called))
    assert check_router("topk").passed
    assert calls == ["overlapped_forward_backward", "interleaved_forward"]
