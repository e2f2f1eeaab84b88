"""The examples and the custom layers of the documentation: each trains, passes its check, and does what it says."""

import functools
import importlib.util
import math
import re
import runpy
import sys
from typing import Any

import pytest
import torch

from moe_dualpipe import cli
from moe_dualpipe.models import build_model
from moe_dualpipe.tools import checks as testing
from tests.support.models import CONFIG, with_choices
from tests.support.runs import ROOT, SMALL, losses, records

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


LAYERS = {
    "experts": [
        ("squared_relu", "SquaredReLUExperts"), ("module_list", "GELUExpert"), ("module_list", "linear_experts"),
        ("widths", "WideOrNarrow"), ("zero_computation", "expert"), ("fused", "FusedExperts"),
    ],
    "router": [("expert_choice", "ExpertChoice"), ("hash_router", "HashRouter"), ("top_p", "TopP")],
    "attention": [("sliding_window", "SlidingWindow")],
    "block": [("parallel_block", "ParallelBlock")],
}  # fmt: skip
LOOPS = {"GELUExpert", "linear_experts", "WideOrNarrow", "expert"}  # over experts: the host waits for their sizes


@pytest.mark.quick("router-expert_choice-ExpertChoice")
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


# ---- Routers ----


def routed(name, x, options=""):
    router = whole(router=named(*name), router_options=options).layers["1"].mlp.router
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.mul_(5)  # far from uniform
    return router, *router(x)


def test_expert_choice_gives_each_expert_its_best_tokens():
    x = torch.randn(3, 10, CONFIG.hidden_size)
    router, weights, ids = routed(("expert_choice", "ExpertChoice"), x)
    scores = router.logits(x.flatten(0, 1)).softmax(-1).view(3, 10, 5)
    best = scores.topk(4, dim=1).indices  # of a sequence: 10 tokens x 2 choices / 5 experts
    chosen = torch.zeros(3, 10, 5, dtype=torch.bool).scatter_(1, best, True)
    assert torch.equal(ids.view(3, 10, 5), torch.where(chosen, torch.arange(5), -1))
    torch.testing.assert_close(weights.view(3, 10, 5)[chosen], scores[chosen])


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


# ---- docs/custom_layers.md, followed literally: its expert trains, its check passes, and its mistake is found ----


PAGE = (ROOT / "docs" / "custom_layers.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PYTHON = [block for language, block in BLOCKS if language == "python"]
PRINTED = [block for language, block in BLOCKS if not language]
MISTAKE = next(code for code in PYTHON if "rows.mean" in code).strip()


@pytest.fixture
def expert(tmp_path, monkeypatch):
    """The first expert of the page, as my_experts.py in the current folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my_experts.py"
    file.write_text(PYTHON[0])
    return file


def verdicts(report):
    """The names of the checks and their results."""
    return re.findall(r"^(\S.*?  +[A-Za-z]+)  ", report, re.MULTILINE)


def check(capsys):
    code = cli.main(["check", "experts", "my_experts.py:GELUExpert"])
    return code, capsys.readouterr().out


@pytest.mark.usefixtures("expert")
def test_the_expert_trains_and_passes_the_check(capsys):
    quick = [*map(str, SMALL), "--steps", "2", "--sample-tokens", "0", "--device", "cpu"]
    cli.main(["train", *quick, "--out", "run", "--experts", "my_experts.py:GELUExpert"])
    assert len(losses(records("run"))) == 2
    capsys.readouterr()
    code, report = check(capsys)
    (page,) = (block for block in PRINTED if block.startswith("check of the expert layer"))
    assert code == 0
    assert verdicts(report) == verdicts(page) and len(verdicts(page)) > 11


def test_the_mistake_of_the_page_is_found(expert, capsys):
    lines = expert.read_text().rstrip().splitlines()
    expert.write_text("\n".join([*lines[:-1], f"        {MISTAKE}", ""]))
    code, report = check(capsys)
    (page,) = (block for block in PRINTED if block.startswith("rows independent  "))
    assert code == 1
    assert page in report


@pytest.mark.parametrize("name", ["GELUExperts", "gelu_experts", "PlainRouter", "WideOrNarrow", "some_null_experts"])
def test_the_other_layers_of_the_page_are_built(name):
    code = next(code for code in PYTHON if re.search(rf"(class|def) {name}\b", code))
    names: dict[str, Any] = {"__name__": "page"}
    exec(code, names)
    model: Any = build_model(with_choices(**{"router" if "Router" in name else "experts": names[name]}))
    assert model.layers["1"].mlp.experts is not None


# ---- Invalid options of the examples print one line and exit with code 2 ----


@pytest.mark.parametrize(
    "arguments,message",
    [
        ("own_stages.py", "each rank is a process: start them with torchrun --nproc-per-node 2 examples/own_stages.py"),
        ("overlapped_pair.py --ranks 7", "32 experts cannot be divided evenly over 7 ranks"),
        ("overlapped_pair.py --gb-per-s 0", "a link needs a positive bandwidth: got 0.0 GB/s"),
        ("fused_experts.py --top-k 9", "k must be from 1 to 4, the number of eligible experts: got 9"),
    ],
)
def test_an_invalid_option_of_an_example(monkeypatch, capsys, arguments, message):
    name, *options = arguments.split()
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # fused_experts.py sets it
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [name, *options])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"{name}: error: {message}\n"
