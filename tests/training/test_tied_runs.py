"""Runs with tied embeddings and dense layers anywhere: checkpoints in other layouts, both optimizers, biases."""

import dataclasses

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, change, losses, make_trainer, records, settings, train, train_each

TIED = dataclasses.replace(
    MODEL, tied_embeddings=True, shared_gate=True, qkv_bias=True, num_dense_layers=0, dense_layers=(0, 2),
    router_bias=True,
)  # fmt: skip


def tied_settings(out, name, **changes):
    config = settings(out, model=TIED, seq_len=16, eval_sequences=2, steps=4, bias_rate=0.01, **changes)
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, name=name))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.long
def test_a_checkpoint_resumes_with_other_pipelines(optimizer, tmp_path):
    first = tied_settings(tmp_path / "a", optimizer, pp=2, schedule="1f1b", save_every=2)
    run_ranks(2, train, first)
    resume = str(tmp_path / "a" / "checkpoints" / "step-000002")
    other = tied_settings(tmp_path / "b", optimizer, resume=resume)
    layout = {"schedule": "dualpipe", "recompute": "full"} if optimizer == "muon" else {"schedule": "dualpipev"}
    expected = {step: loss for step, loss in losses(records(tmp_path / "a")).items() if step > 2}
    assert [*expected] == [3, 4]
    found = [run_ranks(2, train, change(other, pp=2, **layout))[0]]
    found += run_ranks(1, train_each, [change(other, pp=1, fused_loss=True, out=str(tmp_path / "c"))])[0]
    for run in found:
        assert losses(run) == pytest.approx(expected, rel=1e-6)


def state_of_a_step(rank, config):
    """The kinds of state of the embedding, after a step, and the names of buffers with biases."""
    trainer = make_trainer(rank, config)
    before = {name: tensor.clone() for name, tensor in trainer.state().items()}
    loads = trainer.balance.loads
    seen = []
    trainer.balance.loads = lambda device: seen.append(loads(device)) or seen[-1]  # type: ignore[method-assign]
    trainer.step(0)
    changed = [name for name, tensor in trainer.state().items() if not tensor.equal(before[name])]
    biases = {name: t.tolist() for name, t in trainer.buffers.state().items() if name.endswith("bias_E")}
    return sorted(trainer.state()), changed, biases, seen[0].tolist()


def test_muon_leaves_the_embedding_to_adamw_and_biases_follow_the_loads(tmp_path):
    ranks = run_ranks(2, state_of_a_step, tied_settings(tmp_path, "muon", pp=2, schedule="1f1b"))
    names = {name for state, *_ in ranks for name in state}
    assert {name for name in names if "embedding" in name or "head" in name} == {
        "model.embedding.weight", "exp_avg.embedding.weight", "exp_avg_sq.embedding.weight"
    }  # fmt: skip
    assert "momentum.layers.1.mlp.shared.down.weight" in names
    assert "exp_avg.layers.1.mlp.shared_gate.weight" in names
    assert "exp_avg.layers.1.attention.qkv.bias" in names
    assert sum("model.embedding.weight" in changed for _, changed, *_ in ranks) == 1  # one owner
    biases = {name: bias for _, _, found, _ in ranks for name, bias in found.items()}
    for layer, load in zip((1, 3), ranks[0][3], strict=True):
        assert sum(load) == 4 * 16 * TIED.experts_per_token
        mean = sum(load) / len(load)
        expected = [0.01 * ((mean > n) - (mean < n)) for n in load]
        assert biases[f"model.layers.{layer}.mlp.router.bias_E"] == pytest.approx(expected)
