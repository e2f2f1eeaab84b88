"""The layers in examples/layers: each trains, passes its check, and does what its docstring says."""

import dataclasses
import functools
import importlib.util
import math
import runpy
import sys
from typing import Any

import pytest
import torch

from moe_dualpipe.expert_parallel import Local
from moe_dualpipe.models import StageOptions, build_model
from moe_dualpipe.overlap import Comm, Compute, PrepareComm
from moe_dualpipe.tools import checks as testing
from tests.support.models import CONFIG, with_choices
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, ROOT, SMALL, change, losses, records, settings, train

FOLDER = ROOT / "examples" / "layers"
FILES = sorted(path.stem for path in FOLDER.glob("*.py"))
QUICK = [
    "--steps",
    3,
    "--warmup-steps",
    1,
    "--batch-size",
    4,
    "--sample-tokens",
    0,
    "--set",
    "metrics.eval_sequences=2",
]


@functools.cache
def example(name) -> Any:
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(f"layer_example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def named(name, of):
    return f"{FOLDER / name}.py:{of}"


def whole(**choices) -> Any:
    return build_model(with_choices(**choices))


# ---- Each trains ----


@pytest.mark.parametrize("name", FILES)
def test_an_example_trains_and_its_loss_falls(name, tmp_path, monkeypatch, capsys):
    arguments = [*map(str, (*SMALL, *QUICK)), "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [f"examples/layers/{name}.py", *arguments])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    first, *_, last = losses(records(tmp_path)).values()
    assert first == pytest.approx(math.log(256), abs=0.1)
    assert last < first - 0.05
    assert "validation loss" in capsys.readouterr().out


def losses_by_ep(rank, config):
    """The losses with all experts on each of two ranks, and with half of them on each."""
    changes = [{"ep": ep, "out": f"{config.checkpoint.out}/{ep}"} for ep in (1, 2)]
    return [losses(train(rank, change(config, **changes_))) for changes_ in changes]


def test_two_ranks_with_half_of_the_experts_have_the_same_losses(tmp_path):
    """Three layers of the examples at once: experts that differ, a router that skips choices, and a block."""
    model = dataclasses.replace(
        MODEL, num_layers=2, experts=named("zero_computation", "expert"), router=named("top_p", "TopP"),
        router_options="p=0.5 most=3", block=named("parallel_block", "ParallelBlock"),
    )  # fmt: skip
    config = settings(tmp_path, model=model, pp=1, steps=2, seq_len=16, batch_size=4, eval_sequences=2)
    whole_, halved = run_ranks(2, losses_by_ep, config)[0]
    assert len(whole_) == 2
    assert halved == pytest.approx(whole_, rel=1e-5)


@pytest.mark.long
def test_custom_attention_trains_in_a_pipeline_and_resumes_in_one_process(tmp_path):
    attention = {"attention": named("sliding_window", "SlidingWindow"), "attention_options": "window=7"}
    model = dataclasses.replace(MODEL, **attention)
    config = settings(tmp_path / "two", model=model, steps=4, save_every=2, seq_len=16, eval_sequences=2)
    piped = losses(run_ranks(2, train, config)[0])
    checkpoint = tmp_path / "two" / "checkpoints" / "step-000002"
    alone = change(config, out=str(tmp_path / "one"), resume=str(checkpoint), save_every=None)
    resumed = losses(run_ranks(1, train, alone)[0])
    assert sorted(resumed) == [3, 4] and len(piped) == 4
    assert resumed == pytest.approx({step: piped[step] for step in resumed}, rel=1e-5)


LAYERS = {
    "experts": [
        ("squared_relu", "SquaredReLUExperts"), ("module_list", "GELUExpert"), ("module_list", "linear_experts"),
        ("widths", "WideOrNarrow"), ("zero_computation", "expert"), ("lora", "LoRAExperts"), ("fused", "FusedExperts"),
    ],
    "router": [("expert_choice", "ExpertChoice"), ("hash_router", "HashRouter"), ("top_p", "TopP")],
    "attention": [("sliding_window", "SlidingWindow")],
    "block": [("parallel_block", "ParallelBlock")],
}  # fmt: skip
LOOPS = {"GELUExpert", "linear_experts", "WideOrNarrow", "expert"}  # over experts: the host waits for their sizes


@pytest.mark.parametrize("kind,name,of", [(kind, *layer) for kind, layers in LAYERS.items() for layer in layers])
def test_an_example_passes_its_check(kind, name, of):
    report = getattr(testing, f"check_{kind}")(named(name, of))
    assert report.passed, report
    expected = ["no host sync"] if of in LOOPS else ["rows independent"] if of == "ExpertChoice" else []
    assert [check.name for check in report.checks if check.status == "warning"] == expected, report


# ---- Experts ----


def test_the_fused_activation_equals_plain_torch():
    act = example("fused").gated_squared_relu
    for rows in (0, 1, 37):
        z = torch.randn(rows, 2 * 30, requires_grad=True)
        weights = torch.randn(rows, 30)
        results = []
        for kernels in ("reference", "triton"):
            h = act(z, kernels)
            results.append((h, *torch.autograd.grad((h * weights).sum(), z)))
        torch.testing.assert_close(*results)
    with pytest.raises(ValueError, match="float64"):
        act(torch.randn(2, 4, dtype=torch.float64), "triton")


def test_lora_starts_as_the_built_in_experts_and_trains_only_its_own_matrices():
    built_in, lora = whole(), whole(experts=example("lora").LoRAExperts, expert_options="rank=3")
    tokens = torch.arange(12).view(2, 6)
    torch.testing.assert_close(lora(tokens), built_in(tokens))
    lora(tokens).square().mean().backward()
    experts = lora.layers["1"].mlp.experts
    trained = {name for name, parameter in experts.named_parameters() if parameter.requires_grad}
    assert trained == {"gate_up_A", "gate_up_B", "down_A", "down_B"}
    assert experts.gate_up.grad is None and experts.down_B.grad.abs().sum() > 0
    assert experts.gate_up_A.shape == (5, 3, 16) and experts.down_B.shape == (5, 16, 3)


def test_special_experts_have_the_last_ids():
    layer = whole(experts=example("zero_computation").expert).layers["1"].mlp.experts
    rows = torch.randn(3, CONFIG.hidden_size)
    outputs = [layer(rows, torch.tensor([3 * (i > e) for i in range(6)])) for e in range(5)]
    assert torch.equal(outputs[2], torch.zeros_like(rows)) and torch.equal(outputs[3], rows)
    gate = (rows @ layer.each[4].gate.weight.T).sigmoid()
    torch.testing.assert_close(outputs[4], gate * rows + (1 - gate) * layer.each[4].v)
    assert not any(torch.equal(output, rows) for output in outputs[:2])


def test_widths_and_lists_are_those_of_their_files():
    layer = whole(experts=example("widths").WideOrNarrow, expert_options="widths=3,7").layers["2"].mlp.experts
    assert [expert[0].out_features for expert in layer.each] == [3, 7, 3, 7, 3]
    layer = whole(experts=example("module_list").linear_experts).layers["2"].mlp.experts
    assert {name for name, _ in layer.named_parameters()} >= {"each.4.weight", "each.4.bias"}


# ---- Routers ----


def routed(name, x, options=""):
    router = whole(router=named(*name), router_options=options).layers["1"].mlp.router
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.mul_(5)  # far from uniform
    return router, *router(x)


def test_expert_choice_gives_all_experts_the_same_number_of_tokens():
    x = torch.randn(3, 10, CONFIG.hidden_size)
    router, weights, ids = routed(("expert_choice", "ExpertChoice"), x)
    assert weights.shape == ids.shape == (30, 5)
    assert (ids >= 0).view(3, 10, 5).sum(1).tolist() == [[4] * 5] * 3  # 10 tokens x 2 choices / 5 experts
    assert all(column[column >= 0].eq(e).all() for e, column in enumerate(ids.T))
    chosen = ids.view(3, 10, 5)[1] >= 0
    scores = weights.view(3, 10, 5)[1]
    assert (scores.masked_fill(~chosen, 9).min(0).values >= scores.masked_fill(chosen, -9).max(0).values).all()
    assert not torch.equal(router(x[:, :5])[1], ids.view(3, 10, 5)[:, :5].flatten(0, 1))  # later tokens matter


def test_the_hash_router_uses_all_experts_and_depends_on_the_token_alone():
    x = torch.randn(2, 200, CONFIG.hidden_size)
    router, weights, ids = routed(("hash_router", "HashRouter"), x)
    assert ids.unique().tolist() == [0, 1, 2, 3, 4] and (ids[:, 0] != ids[:, 1]).all()
    assert (ids.flatten().bincount() > 400).tolist() == [False] * 5
    assert torch.equal(router(x[:1, 7:8])[1][0], ids[7]) and (weights == 0.5).all()
    assert len({tuple(row.tolist()) for row in ids}) == 5


def test_top_p_uses_the_fewest_experts_that_reach_p():
    x = torch.randn(2, 50, CONFIG.hidden_size)
    router, weights, ids = routed(("top_p", "TopP"), x, "p=0.5 most=4")
    probs, order = router.logits(x.flatten(0, 1)).softmax(-1).sort(descending=True)
    needed = (probs.cumsum(-1) < 0.5).sum(-1) + 1
    assert {*needed.tolist()} >= {1, 2}
    for row, count, best in zip(ids.tolist(), needed.tolist(), order.tolist(), strict=True):
        assert row == best[:count] + [-1] * (4 - count)
    torch.testing.assert_close(weights, probs[:, :4])


# ---- Attention and the block ----


def test_a_sliding_window_ends_after_its_positions():
    attention = whole(attention=named("sliding_window", "SlidingWindow"), attention_options="window=3")
    attention = attention.layers["1"].attention
    x = torch.randn(1, 9, CONFIG.hidden_size)
    changed = x.clone()
    changed[:, 4] += 1
    differs = (attention(x) - attention(changed)).abs().amax(-1)[0] > 1e-6
    assert differs.nonzero().flatten().tolist() == [4, 5, 6]
    mask = torch.zeros(1, 1, 9, 9, dtype=torch.bool)
    mask[..., :5, :5] = mask[..., 5:, 5:] = True
    differs = (attention(x, mask.tril()) - attention(changed, mask.tril())).abs().amax(-1)[0] > 1e-6
    assert differs.nonzero().flatten().tolist() == [4]


def test_the_parallel_block_computes_attention_while_tokens_travel():
    block = example("parallel_block").ParallelBlock(CONFIG, 0, Local(5), StageOptions())
    x = torch.randn(2, 6, CONFIG.hidden_size)
    normal = block.norm(x)
    torch.testing.assert_close(block(x), x + block.attention(normal) + block.moe(normal))
    kinds, segments = [], block.segments

    def recorded(x_BSD):
        inner, reply = segments(x_BSD), None
        while True:
            try:
                segment = inner.send(reply)
            except StopIteration as stop:
                return stop.value
            kinds.append((type(segment), segment.name))
            reply = yield segment

    block.segments = recorded
    block(x)
    assert kinds[:4] == [(Compute, "route"), (PrepareComm, "dispatch"), (Comm, "dispatch"), (Compute, "attn")]
    assert kinds[-2:] == [(Comm, "combine"), (Compute, "add")]
