"""Custom layers: how they are found, built, given options, and called. A mistake in one is a line with its place."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_dualpipe.errors import user_error
from moe_dualpipe.expert_parallel import Local
from moe_dualpipe.models import MoE, build_model, next_token_loss
from tests.support import broken_layers, own_layers
from tests.support.models import CONFIG, with_choices

HERE = "tests.support.own_layers"
FILE, BROKEN = Path(own_layers.__file__), Path(broken_layers.__file__)
TOKENS = torch.arange(12).view(2, 6) % CONFIG.vocab_size


def model_of(**choices) -> Any:
    return build_model(with_choices(**choices))


# ---- Found ----


def test_a_class_can_be_named_by_module_file_or_object(monkeypatch):
    monkeypatch.chdir(FILE.parents[2])
    names = [f"{HERE}:Expert", "tests/support/own_layers.py:Expert", str(FILE) + ":Expert", own_layers.Expert]
    models = [model_of(experts=name) for name in names]
    assert [model.config.experts for model in models] == [*names[:3], f"{HERE}:Expert"]
    first, *others = (model.state_dict() for model in models)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


OWN = """
from torch import nn
import neighbor_of_own


class Own(nn.Linear):
    def __init__(self, config):
        super().__init__(config.hidden_size, config.hidden_size)
"""


def test_a_file_imports_its_neighbors_once_and_is_read_again_after_a_mistake(tmp_path):
    file = tmp_path / "corrected file.py"
    file.write_text(f"mistake\n{OWN}")
    with pytest.raises(ValueError, match=r"corrected file.py:1: NameError: name 'mistake' is not defined"):
        model_of(experts=f"{file}:Own")
    file.write_text(OWN)
    (tmp_path / "neighbor_of_own.py").touch()
    first, second = (type(model_of(experts=f"{file}:Own").layers["1"].mlp.experts.each[0]) for _ in range(2))
    assert first is second


# ---- Options ----


def test_options_are_parsed_by_the_types_of_the_dataclass():
    config = with_choices(
        experts=own_layers.VariedExpert, expert_options={"factor": 0.5, "widths": [3, 5], "bias": True}
    )
    assert config.expert_options == "factor=0.5 widths=3,5 bias=True"
    assert config == with_choices(experts=own_layers.VariedExpert, expert_options=own_layers.Widths(0.5, (3, 5), True))
    layer = model_of(experts=own_layers.VariedExpert, expert_options=config.expert_options).layers["2"].mlp.experts.each
    assert [expert[0].out_features for expert in layer] == [3, 5, 3, 5, 3]
    assert [expert.place for expert in layer] == [(2, e) for e in range(5)]
    assert layer[0].factor == 0.5 and layer[0][0].bias is not None
    assert model_of(experts=own_layers.VariedExpert).layers["1"].mlp.experts.each[0].factor == 1.0


# ---- Experts and routers ----


@pytest.mark.parametrize("name", ["Expert", "expert_list", "ExpertList", "swiglu_function"])
def test_single_experts_and_functions_equal_stacked_experts(name):
    layer: Any = MoE(with_choices(experts=f"{HERE}:{name}"), Local(5), 0).double()
    experts = layer.experts
    x = torch.randn(7, CONFIG.hidden_size, dtype=torch.float64)
    swiglu = MoE(with_choices(expert_size=6), Local(5), 0).double()
    swiglu.router, swiglu.shared = layer.router, None
    for weight in ("gate_up", "down"):
        stacked = getattr(experts, weight, None)
        if stacked is None:
            stacked = torch.stack([getattr(expert, weight).weight for expert in experts.each])
        swiglu.experts.get_parameter(weight).data = stacked
    torch.testing.assert_close(layer(x), swiglu(x) + layer.shared(x), rtol=1e-10, atol=1e-12)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in experts.parameters())


# ---- Attention and blocks ----


OTHERS = [
    {"attention": own_layers.WithoutCache}, {"attention": own_layers.WithCache}, {"block": own_layers.ParallelBlock},
    {"block": own_layers.PlainBlock, "block_options": "factor=0.5"},
]  # fmt: skip


@pytest.mark.parametrize("choices", OTHERS, ids=lambda choices: next(iter(choices.values())).__name__)
def test_generation_with_a_cache_equals_the_whole_text_at_once(choices):
    """Also for layers that take no cache: it keeps their inputs."""
    generate = pytest.importorskip("moe_dualpipe.inference").generate
    model = model_of(**choices).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # far from uniform
    whole = TOKENS
    for _ in range(5):
        with torch.no_grad():
            best_B = model.logits(model(whole))[:, -1].argmax(-1)
        whole = torch.cat([whole, best_B[:, None]], dim=1)
    assert torch.equal(generate(model, TOKENS, 5, 64, temperature=0.0), whole[:, TOKENS.shape[1] :])


# ---- Refusals ----


def no_module(config):  # noqa: ARG001
    return own_layers.Widths()


def two_modules(config, num_local_experts):  # noqa: ARG001
    return nn.ModuleList(nn.Identity() for _ in range(2))


class TooMany(nn.Module):
    def __init__(self, config, num_local_experts, expert_ids, width):
        super().__init__()


VARIED = {"experts": f"{HERE}:VariedExpert"}
REFUSED = [
    ({"experts": "nowhere.py:Own"}, "cannot import the expert layer .*: nowhere.py is not a file; the current folder"),
    ({"experts": "nowhere_at_all:Y"}, "cannot import the expert layer 'nowhere_at_all:Y': No module named"),
    ({"experts": "math:pi"}, "the expert layer 'math:pi' must be a class or a function: got float"),
    ({"experts": TooMany}, r"TooMany\(config, num_local_experts\) or .*: missing a .* argument: 'width'"),
    ({"experts": nn.Module}, r"too many positional|missing|has no constructor"),
    ({"router": f"{HERE}:Nothing"}, f"cannot find the router '{HERE}:Nothing': {HERE} has no Nothing"),
    ({"router": f"{HERE}:PlainRooter"}, f"{HERE} has no PlainRooter; did you mean PlainRouter\\?"),
    ({"router": f"{HERE}:Widths"}, r"the router '.*:Widths' must accept Widths\(config\): it is not an nn.Module"),
    ({"router": no_module}, r"test_own_layers.py:\d+ in no_module: the router .* nn.Module: got Widths"),
    ({"router": f"{HERE}:PlainRouter", "z_loss": 0.1}, "z_loss are losses of `Router`: derive PlainRouter from it, or"),
    ({"attention": f"{HERE}:ParallelBlock"}, r"must accept ParallelBlock\(config\): missing a required argument"),
    ({"block": f"{HERE}:Expert"}, r"must accept Expert\(config, layer, expert_parallel, stage_options\): too many"),
    ({"experts": two_modules}, "must return one module per expert: got 2 modules for 1 expert"),
    (VARIED | {"expert_options": "depth=3"}, "Widths has no option 'depth'; choose from: factor, widths, bias"),
    (VARIED | {"expert_options": "factor=much"}, "--factor: invalid choice|factor.*much"),
    (VARIED | {"expert_options": "name='it"}, "cannot split the options"),
    ({"experts": f"{HERE}:Expert", "expert_options": "rank=8"}, "takes no options: got 'rank=8'; give its constructor"),
]


@pytest.mark.parametrize("choices,problem", REFUSED)
def test_layers_that_do_not_fit_are_refused(choices, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        model_of(**choices)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text,problem", [
    ("import torch\n\nclass Y(:\n    pass\n", "3: SyntaxError: invalid syntax"),
    ("\ndef f():\n    return 1 / 0\n\nf()\n", "3 in f: ZeroDivisionError: division by zero"),
    ("import sys\nsys.exit('usage:\\nrun')\n", "2: SystemExit: usage: run"),
])  # fmt: skip
def test_an_error_in_a_file_is_one_line(text, problem, tmp_path, monkeypatch):
    (tmp_path / "wrong.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^cannot import the expert layer 'wrong.py:Y': wrong.py:{problem}$"):
        model_of(experts="wrong.py:Y")


@pytest.mark.parametrize("choices", [OTHERS[0], OTHERS[3]], ids=["attention", "block"])
def test_a_layer_without_a_mask_refuses_to_mask_documents(choices):
    model = build_model(with_choices(**choices))
    with pytest.raises(ValueError, match="has no parameter mask_B1SS: it cannot mask documents"):
        model(TOKENS, torch.zeros_like(TOKENS))


# ---- Errors in a layer ----


FP32 = "in float32 on cpu"

IN_MODEL = {
    "experts": {
        "Product": (".forward", "experts", "mat1 and mat2 shapes cannot be multiplied (24x16 and 3x3)"),
        "Inner": ("scaled", "experts", "KeyError: 'scale'"),
        "Double": (".forward", "experts", f"Double must return [24, 16] {FP32}: got [24, 16] in float64 on cpu"),
        "InBackward": ("_Fails.backward", "mlp backward", "RuntimeError: no gradient of [16]"),
        "Reset": (".reset_expert", "experts", "AttributeError: 'Reset' object has no attribute 'down'"),
        "function_fails": ("function_fails", "experts", "mat1 and mat2 shapes cannot be multiplied"),
    },
    "router": {
        "FewTokens": (".forward", "router", "both [12, K]: got [11, 2] in float32 on cpu and [11, 2] in int64 on cpu"),
    },
    "attention": {
        "AttentionFlattens": (".forward", "attention", f"must return [2, 6, 16] {FP32}: got [12, 16] {FP32}"),
    },
    "block": {
        "BlockFails": (".segments", "block", "IndexError: between two segments"),
        "ForwardOfBlock": (".forward", "block", f"must return [2, 6, 16] {FP32}: got a list of 1"),
    },
}  # fmt: skip
"""For each part of the model, and each broken class: the function, the part that is named, and the message."""
CASES = [(part, name, *expected) for part, classes in IN_MODEL.items() for name, expected in classes.items()]


def marked_line(name):
    """The number of the line with the comment `# name`."""
    return next(i for i, line in enumerate(BROKEN.read_text().splitlines(), 1) if line.endswith(f"# {name}"))


@pytest.mark.parametrize("part,name,function,where,message", CASES, ids=[case[1] for case in CASES])
def test_an_error_in_a_layer_names_its_line(part, name, function, where, message):
    with pytest.raises(Exception) as caught:
        model = model_of(num_layers=2, **{part: f"tests.support.broken_layers:{name}"})
        next_token_loss(model(TOKENS), TOKENS).backward()
    line = user_error(caught.value)
    layer = 0 if part in ("attention", "block") else 1
    function = name + function if function.startswith(".") else function
    place = re.escape(f"{BROKEN.relative_to(Path.cwd())}:{marked_line(name)} in {function}")
    assert line is not None and re.match(rf"{place} \(layer {layer}, ((mlp|attn) forward, )?{where}\): ", line)
    assert message in line
    assert "\n" not in line
    assert any(note.startswith(f"in layer {layer}") for note in caught.value.__notes__)
