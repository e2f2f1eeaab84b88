"""Custom layers: how they are found, built, given options, and called."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_dualpipe.expert_parallel import Local
from moe_dualpipe.inference import generate
from moe_dualpipe.models import ModelConfig, MoE, StageOptions, build_model, check_layers, expert_function, split
from moe_dualpipe.models.build_experts import ExpertBuilder, expert_class
from moe_dualpipe.models.costs import flops_shape
from moe_dualpipe.models.layer_class import name_of
from moe_dualpipe.models.layer_options import options_text, parse_options
from moe_dualpipe.models.router import router_class
from moe_dualpipe.training.options import parse_arguments
from tests.support import own_layers
from tests.support.models import CONFIG, with_choices
from tests.support.oracles import moe_oracle

HERE = "tests.support.own_layers"
FILE = Path(own_layers.__file__)
TOKENS = torch.arange(12).view(2, 6) % CONFIG.vocab_size


def whole(config: ModelConfig) -> Any:
    return build_model(config)


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


def test_a_file_imports_other_files_of_its_folder_once(tmp_path):
    (tmp_path / "neighbor_of_experts.py").write_text("WIDTH = 5\n")
    file = tmp_path / "my experts.py"
    file.write_text(
        "import torch\nfrom neighbor_of_experts import WIDTH\n\n\nclass Own(torch.nn.Linear):\n"
        "    def __init__(self, config):\n        super().__init__(config.hidden_size, config.hidden_size)\n"
        "        self.width = WIDTH\n"
    )
    config = with_choices(experts=f"{file}:Own")
    first, second = (type(whole(config).layers["1"].mlp.experts.each[0]) for _ in range(2))
    assert first is second


OWN = """
from torch import nn


class Own(nn.Linear):
    def __init__(self, config):
        super().__init__(config.hidden_size, config.hidden_size)
"""


def test_a_file_that_could_not_be_imported_is_read_again(tmp_path):
    """As in a notebook, after the mistake is corrected."""
    file = tmp_path / "corrected.py"
    file.write_text(f"mistake\n{OWN}")
    with pytest.raises(ValueError, match=r"corrected.py:1: NameError: name 'mistake' is not defined"):
        check_layers(with_choices(experts=f"{file}:Own"))
    file.write_text(OWN)
    check_layers(with_choices(experts=f"{file}:Own"))


def test_a_module_is_found_in_the_current_folder(tmp_path, monkeypatch):
    """The first folder of an installed program is that of the program."""
    (tmp_path / "module_of_own_layers.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    check_layers(with_choices(experts="module_of_own_layers:Own"))


def test_the_object_from_a_file_has_the_name_of_the_file():
    """Other processes cannot import the name that this process gave to the module."""
    name = f"{FILE}:PlainRouter"
    assert name_of(router_class(with_choices(router=name)).make) == name


# ---- Options ----


def test_options_are_parsed_by_the_types_of_the_dataclass():
    config = with_choices(
        experts=own_layers.VariedExpert, expert_options={"factor": 0.5, "widths": [3, 5], "bias": True}
    )
    assert config.expert_options == "factor=0.5 widths=3,5 bias=True"
    assert config == with_choices(experts=own_layers.VariedExpert, expert_options=own_layers.Widths(0.5, (3, 5), True))
    layer = whole(config).layers["2"].mlp.experts.each
    assert [expert[0].out_features for expert in layer] == [3, 5, 3, 5, 3]
    assert [expert.place for expert in layer] == [(2, e) for e in range(5)]
    assert layer[0].factor == 0.5 and layer[0][0].bias is not None
    assert model_of(experts=own_layers.VariedExpert).layers["1"].mlp.experts.each[0].factor == 1.0


def test_options_on_the_command_line():
    experts = ["--experts", f"{HERE}:VariedExpert"]
    for words in (
        ["--set", "model.expert_options=factor=0.5 widths=3,5"],
        ["--set", "model.expert_options.factor=0.5", "--steps", "3", "--set", "model.expert_options.widths=3,5"],
        ["--set", "model.expert_options.widths=3,5", "model.expert_options.factor=0.5"],
    ):
        config = parse_arguments([*experts, *words, "--num-layers", "2"])
        assert sorted(str(config.model.expert_options).split()) == ["factor=0.5", "widths=3,5"]
        assert config.model.num_layers == 2
    assert parse_arguments(experts).model.expert_options == ""


# ---- Experts ----


@pytest.mark.parametrize("name", ["Expert", "expert_list", "ExpertList"])
def test_single_experts_equal_a_loop_over_them(name):
    torch.manual_seed(2)
    layer = MoE(with_choices(experts=f"{HERE}:{name}"), Local(5), 0).double()
    each: Any = layer.experts.each
    assert len(each) == 5 and {*layer.experts.state_dict()} >= {"each.4.down.weight"}
    x = torch.randn(7, CONFIG.hidden_size, dtype=torch.float64)
    swiglu = MoE(with_choices(expert_size=6), Local(5), 0).double()
    swiglu.router, swiglu.shared = layer.router, layer.shared
    for weight in ("gate_up", "down"):
        stacked = torch.stack([getattr(expert, weight).weight for expert in each])
        swiglu.experts.get_parameter(weight).data = stacked
    torch.testing.assert_close(layer(x), moe_oracle(swiglu, x), rtol=1e-10, atol=1e-12)


def test_a_function_equals_single_experts_with_its_weights():
    layer = MoE(with_choices(experts=own_layers.swiglu_function), Local(5), 0)
    single = MoE(with_choices(experts=own_layers.Expert), Local(5), 0)
    single.router, single.shared = layer.router, layer.shared
    for e, expert in enumerate(single.experts.each):
        expert.gate_up.weight.data, expert.down.weight.data = layer.experts.gate_up[e], layer.experts.down[e]
    x = torch.randn(9, CONFIG.hidden_size)
    assert torch.equal(layer(x), single(x))
    layer(x).sum().backward()
    assert layer.experts.down.grad.shape == layer.experts.down.shape


@expert_function(up=("expert_size", "hidden_size"), down=("hidden_size", "expert_size"), bias=("hidden_size",))
def with_bias(rows, up, down, bias):
    assert len(rows)
    return rows @ up.T @ down.T + bias


def test_the_weights_of_an_expert_function_start_from_the_deviations_of_the_model():
    config = with_choices(experts=with_bias, hidden_size=64, expert_size=48)
    layer: Any = ExpertBuilder(config, 1, 0).build(range(5))
    assert layer.up.std().item() == pytest.approx(config.init_std, rel=0.05)
    assert layer.down.std().item() == pytest.approx(config.residual_std, rel=0.05)
    assert not layer.bias.any()


# ---- Routers ----


def test_a_router_gets_gradients_loads_and_its_own_loss():
    model = model_of(router=own_layers.PlainRouter)
    router = model.layers["1"].mlp.router
    assert router.layer == 1
    model(TOKENS).square().mean().backward()
    with_loss = router.score.weight.grad.clone()
    assert with_loss.norm() > 0
    assert model.layers["1"].mlp.take_load().sum() == TOKENS.numel() * CONFIG.experts_per_token


# ---- Attention and blocks ----


OTHERS = [
    {"attention": own_layers.WithoutCache}, {"attention": own_layers.WithCache}, {"block": own_layers.ParallelBlock},
    {"block": own_layers.PlainBlock, "block_options": "factor=0.5"},
]  # fmt: skip


@pytest.mark.parametrize("choices", OTHERS, ids=lambda choices: next(iter(choices.values())).__name__)
def test_generation_with_a_cache_equals_the_whole_text_at_once(choices):
    """Also for layers that take no cache: it keeps their inputs."""
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


# ---- FLOPs ----


def test_custom_layers_have_two_flops_per_element_of_a_matrix():
    config = with_choices(experts=own_layers.Expert, num_shared_experts=1, expert_size=6)
    exact = with_choices(expert_size=6)
    own, expected = ([layer.flops(c.hidden_size) for layer in flops_shape(c).layers] for c in (config, exact))
    assert own == expected
    own, expected = flops_shape(with_choices(attention=own_layers.WithCache)), flops_shape(CONFIG)
    assert own.layers[0].flops(CONFIG.hidden_size) == expected.layers[0].flops(CONFIG.hidden_size)
    assert sum(spec.share for spec in split(config, 2)) == pytest.approx(1)


# ---- Refusals ----


def no_module(config):  # noqa: ARG001
    return own_layers.Widths()


def two_modules(config, num_local_experts):  # noqa: ARG001
    return nn.ModuleList(nn.Identity() for _ in range(2))


def with_a_number(config, options: int): ...


def other_names(rows, up, down):  # noqa: ARG001
    return rows


VARIED = {"experts": f"{HERE}:VariedExpert"}
REFUSED = [
    ({"experts": "nowhere.py:Own"}, "cannot import the expert layer .*: nowhere.py is not a file; the current folder"),
    ({"router": f"{HERE}:Nothing"}, f"cannot find the router '{HERE}:Nothing': {HERE} has no Nothing"),
    ({"router": f"{HERE}:Widths"}, r"the router '.*:Widths' must accept Widths\(config\): it is not an nn.Module"),
    ({"router": no_module}, r"test_own_layers.py:\d+ in no_module: the router .* nn.Module: got Widths"),
    ({"router": f"{HERE}:PlainRouter", "z_loss": 0.1}, "z_loss are losses of `Router`: derive PlainRouter from it, or"),
    ({"attention": f"{HERE}:ParallelBlock"}, r"must accept ParallelBlock\(config\): missing a required argument"),
    ({"block": f"{HERE}:Expert"}, r"must accept Expert\(config, layer, expert_parallel, stage_options\): too many"),
    ({"experts": two_modules}, "must return one module per expert: got 2 modules for 1 expert"),
    (VARIED | {"expert_options": "depth=3"}, "Widths has no option 'depth'; choose from: factor, widths, bias"),
    (VARIED | {"expert_options": "factor=much"}, "--factor: invalid choice|factor.*much"),
    ({"experts": f"{HERE}:Expert", "expert_options": "rank=8"}, "takes no options: got 'rank=8'; give its constructor"),
]


@pytest.mark.parametrize("choices,problem", REFUSED)
def test_layers_that_do_not_fit_are_refused(choices, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        model_of(**choices)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong,problem", [
    (lambda: options_text("rank"), "an option of a layer must be key=value: got 'rank'"),
    (lambda: options_text("2x=3"), "must be key=value: got '2x=3'"),
    (lambda: options_text("name='it"), "cannot split the options"),
    (lambda: parse_options(with_a_number, ""), "with_a_number must annotate its parameter `options` with a dataclass"),
    (lambda: expert_function(up=(3, 3))(other_names), "parameters of other_names after the rows must be up: got up, d"),
])  # fmt: skip
def test_options_and_functions_that_do_not_fit_are_refused(wrong, problem):
    with pytest.raises((ValueError, TypeError), match=problem):
        wrong()


@pytest.mark.parametrize("choices", [OTHERS[0], OTHERS[3]], ids=["attention", "block"])
def test_a_layer_without_a_mask_refuses_to_mask_documents(choices):
    model = build_model(with_choices(**choices), options=StageOptions(document_end_id=0))
    with pytest.raises(ValueError, match="has no parameter mask_B1SS: it cannot mask documents"):
        model(TOKENS)


FILES = {
    "broken": ("import torch\n\nclass Y(:\n    pass\n", "broken.py:3: SyntaxError: invalid syntax"),
    "raising": ("\ndef f():\n    return 1 / 0\n\nf()\n", "raising.py:3 in f: ZeroDivisionError: division by zero"),
    "attribute": (
        "import torch\ntorch.nowhere\n",
        "attribute.py:2: AttributeError: module 'torch' has no attribute 'nowhere'",
    ),
    "exiting": ("import sys\nsys.exit('usage:\\nrun')\n", "exiting.py:2: SystemExit: usage: run"),
    "importing": ("import nowhere_at_all\n", "importing.py:1: ModuleNotFoundError: No module named 'nowhere_at_all'"),
}


@pytest.mark.parametrize("module", FILES)
def test_an_expert_layer_whose_file_cannot_be_imported_is_one_line(module, tmp_path, monkeypatch):
    text, problem = FILES[module]
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^cannot import the expert layer '{module}:Y': {problem}$"):
        expert_class(with_choices(experts=f"{module}:Y"))


class TooFew(nn.Module):
    def __init__(self):
        super().__init__()


class TooMany(nn.Module):
    def __init__(self, config, num_local_experts, expert_ids, width):
        super().__init__()


class NoConstructor(nn.Module):
    pass


@pytest.mark.parametrize("name,problem", [
    ("nowhere_at_all:Y", "cannot import the expert layer 'nowhere_at_all:Y': No module named 'nowhere_at_all'"),
    (f"{__name__}:Missing", f"cannot find the expert layer '.*Missing': {__name__} has no Missing"),
    ("math:pi", "the expert layer 'math:pi' must be a class or a function: got float"),
    (f"{__name__}:TooFew", r".* accept TooFew\(config, num_local_experts\) or .*: too many positional .*"),
    (f"{__name__}:TooMany", ".* TooMany.config, num_local_experts. or .*: missing a .* argument: 'width'"),
    (f"{__name__}:NoConstructor", ".* NoConstructor.config, num_local_experts. or .*: it has no constructor"),
])  # fmt: skip
def test_expert_layers_that_cannot_be_used(name, problem):
    with pytest.raises(ValueError, match=f"^{problem}$"):
        expert_class(with_choices(experts=name))
