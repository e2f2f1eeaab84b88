"""A stage's loss, its memory, and initial weights, which depend on seed and name only.

That stages together equal the whole model is in tests/runtime/test_equivalence.py.
"""

from functools import partial

import pytest
import torch

from moe_dualpipe.kernels.cross_entropy import linear_cross_entropy
from moe_dualpipe.models import StageOptions, TransformerStage, build_model, split, transformer
from moe_dualpipe.models.recompute import add_up
from tests.support.models import CONFIG, with_choices
from tests.support.tensors import OperationStats


def test_only_the_last_stage_has_a_loss():
    first, tokens_BS = TransformerStage(CONFIG, split(CONFIG, 2)[0]), torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"only the last stage, .* this has embedding \+ layer"):
        first.loss(first(tokens_BS), tokens_BS)


@pytest.mark.parametrize("fused_loss", [True, False])
def test_only_the_plain_loss_makes_a_tensor_of_the_size_of_the_logits(monkeypatch, fused_loss):
    monkeypatch.setattr(transformer, "linear_cross_entropy", partial(linear_cross_entropy, chunk_tokens=5))
    config = with_choices(vocab_size=601)
    model = build_model(config, options=StageOptions(fused_loss=fused_loss))
    x, labels = torch.randint(601, (2, 2, 11))
    with OperationStats() as seen:
        model.loss(model(x), labels).backward()
        with torch.no_grad():
            model.loss(model(x), labels)
    # Without logits, the largest tensor is the head's weight or its gradient.
    assert seen.max_numel == max(config.hidden_size, x.numel() * (not fused_loss)) * 601


def test_weights_depend_on_seed_and_name_only():
    torch.manual_seed(1)
    first = build_model(CONFIG, options=StageOptions(seed=4)).state_dict()
    before = torch.random.get_rng_state()
    second = build_model(CONFIG, options=StageOptions(seed=4)).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())  # the caller's generator does not change
    other = build_model(CONFIG, options=StageOptions(seed=5)).state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert value.ndim == 1 or not torch.equal(value, other[name]), name
    matrices = [m for value in first.values() if value.ndim > 1 for m in (value if value.ndim == 3 else [value])]
    assert len({tuple(matrix.flatten()[:3].tolist()) for matrix in matrices}) == len(matrices)


def test_projections_into_the_residual_stream_start_smaller():
    config = with_choices(num_shared_experts=2, hidden_size=64, dense_size=128)
    for name, parameter in build_model(config).named_parameters():
        if parameter.ndim > 1:
            smaller = (2 * config.num_layers) ** 0.5 if "out." in name or "down" in name else 1
            assert parameter.std().item() == pytest.approx(config.init_std / smaller, rel=0.2), name


def test_add_up_adds_the_residual_stream_last():
    assert add_up(torch.tensor([1.0]), torch.tensor([1e8]), torch.tensor([-1e8])).item() == 1
