"""Training that starts from published weights gives the same losses and weights as transformers with torch's AdamW."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from moe_dualpipe.checkpoint.huggingface import from_pretrained
from tests.support.published import random_model, save
from tests.support.published_runs import CLIP, CONFIG, batches, train_under_each, weights_by_global_name
from tests.support.ranks import run_ranks


def train_transformers(model: Any) -> tuple[list[float], list[float]]:
    """The losses and the norms of the gradients. AdamW decays matrices only."""
    model.train()
    decayed, others = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": CONFIG.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=CONFIG.lr, betas=(CONFIG.beta1, CONFIG.beta2))
    losses, norms = [], []
    for batch in batches():
        loss = F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("name,layouts", [("qwen2_moe", ["dualpipev", "1f1b"]), ("deepseek_v3", ["dualpipe", "ep 2"])])
@pytest.mark.long
def test_twenty_steps_equal_those_of_transformers(name, layouts, tmp_path):
    changes = {"num_experts": 6} if name == "qwen2_moe" else {}
    theirs = random_model(name, num_hidden_layers=4, **changes)
    folder = save(theirs, tmp_path / "before")
    losses, norms = train_transformers(theirs)
    assert min(norms) < CLIP < max(norms)  # some are clipped
    assert losses[15] < losses[0] - 0.1
    before, after = (from_pretrained(f) for f in (folder, save(theirs, tmp_path / "after")))
    initial, expected = (weights_by_global_name([model]) for model in (before, after))
    biases = [key for key in expected if key.endswith("bias_E")]
    assert bool(biases) == (name == "deepseek_v3")
    assert all(torch.equal(initial[key], expected[key]) for key in biases)

    results = run_ranks(2, train_under_each, layouts, folder)
    for layout in layouts:
        held = {}
        for rank in results:
            rank_losses, rank_norms, weights = rank[layout]
            torch.testing.assert_close(rank_losses, losses, rtol=0, atol=1e-5, msg=lambda m, n=layout: f"{n}: {m}")
            torch.testing.assert_close(rank_norms, norms, rtol=1e-4, atol=0, msg=lambda m, n=layout: f"{n}: {m}")
            held |= {key: torch.from_numpy(value) for key, value in weights.items()}
        assert held.keys() == expected.keys(), layout
        for key, tensor in held.items():
            change = (expected[key] - initial[key]).norm()  # AdamW magnifies the rounding of very small gradients
            assert (tensor - expected[key]).norm() <= 1e-4 * change, (layout, key)
        assert all(torch.equal(held[key], initial[key]) for key in biases), layout
