"""Results of a run against the reference's: what counts as a fault, and where it is."""

from typing import Any

import pytest
import torch
from moe_dualpipe.tools.checks.compare import compare, find_faults, may_be_rounding
from torch import nn

from moe_dualpipe.tools.checks.run import Results
from moe_dualpipe.tools.checks.subject import prepare, without_dropout
from moe_dualpipe.tools.checks.variants import OTHER_ORDER, OTHER_ROWS, SAME_ORDER

NAN = float("nan")


def results(**changes) -> Results:
    """Two sequences of three tokens each in one micro-batch, two parameters and two buffers. Changes are added."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    made = Results(
        weights={"up": draw(3, 2), "down": draw(2)}, logits={(0, s): draw(3, 5) for s in (0, 1)},
        losses={(0, s): draw(3).abs() for s in (0, 1)}, buffers={"load": torch.tensor([3, 4]), "bias": draw(2)},
        gradients={"up": draw(3, 2), "down": draw(2)},
    )  # fmt: skip
    for kind, (key, change) in changes.items():
        values = getattr(made, kind)
        values[key] = values[key] + change
    return made


def faults(*ranks, tolerance=OTHER_ORDER):
    return find_faults([compare(rank, results()) for rank in ranks], tolerance)


def test_equal_results_have_no_fault():
    measured, found = faults(results(), results(), tolerance=SAME_ORDER)
    assert measured == "losses equal, logits equal, gradients equal" and found == {}


@pytest.mark.parametrize("kind,key,change,fault", [
    ("weights", "up", 1e-6, "weights differ by "),
    ("losses", (0, 1), torch.tensor([0, 0, 1e-5]), "position 2 of sequence 1 in step 1"),
    ("logits", (0, 0), torch.tensor([[0], [1], [0]]), "position 1 of sequence 0 in step 1"),
    ("logits", (0, 0), torch.tensor([[0], [0], [NAN]]), "logits differ by inf, above the tolerance of 0: position 2"),
    ("buffers", "load", 1, "buffers differ by "),
    ("gradients", "down", 1e-3, "above the tolerance of 4.5e-07: down"),
    ("gradients", "down", NAN, "gradients differ by inf, above the tolerance of 4.5e-07: down"),
])  # fmt: skip
def test_a_difference_on_any_rank_is_a_fault(kind, key, change, fault):
    """Among them values that are not a number."""
    for ranks in ([results(**{kind: (key, change)}), results()], [results(), results(**{kind: (key, change)})]):
        (found,) = faults(*ranks)[1].values()
        assert fault in found


def test_what_no_rank_has_is_a_fault():
    first, second = results(), results()
    del first.gradients["up"], second.gradients["down"]
    assert faults(first, second)[1] == {}
    del second.gradients["up"], first.gradients["down"]
    (found,) = faults(first, second)[1].values()
    assert found.startswith("gradients: no rank has down and 1 more")


def test_another_shape_is_a_fault():
    wrong = results()
    wrong.gradients["up"] = wrong.gradients["up"][:2]
    assert faults(wrong)[1] == {"gradients": "gradients differ by inf, above the tolerance of 4.5e-07: up on rank 0"}


def test_tolerances_are_those_of_the_variant():
    near = results(logits=((0, 0), 1e-6), losses=((0, 0), 1e-7))
    assert faults(near, tolerance=OTHER_ROWS)[1] == {}
    assert len(faults(near)[1]) == 2


@pytest.mark.parametrize("changes,expected", [
    ({"gradients": ("up", 1e-3)}, True), ({"gradients": ("up", 1.0)}, False),
    ({"gradients": ("up", 1.0), "logits": ((0, 1), 1.0)}, True), ({"weights": ("up", 1e-9)}, True),
    ({"weights": ("up", 1e-6)}, False),
])  # fmt: skip
def test_rounding_explains_other_choices_of_experts_but_no_other_weights(changes, expected):
    assert may_be_rounding([compare(results(**changes), results())]) is expected


def test_a_prepared_module_has_no_dropout_and_no_constant_weights():
    """The same on all ranks. A weight of zeros would hide wrong gradients."""
    made: Any = [prepare(nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(4)), seed=3) for _ in range(2)]
    for module in made:
        without_dropout(module)
        assert module[0].p == 0 and module[1].weight.dtype == torch.float64
        assert 0 < (module[1].weight - torch.ones(4)).abs().max() < 0.3 and module[1].bias.unique().numel() == 4
    assert torch.equal(made[0][1].weight, made[1][1].weight)
