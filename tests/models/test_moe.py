"""The Mixture-of-Experts layer against a loop, and custom expert layers."""

from math import nan

import pytest
import torch
from torch import nn

from moe_dualpipe.expert_parallel import Combined, Completed, Local, Received, Route
from moe_dualpipe.kernels.permute import permute
from moe_dualpipe.models import MoE, StageOptions
from moe_dualpipe.models.build_experts import expert_class
from moe_dualpipe.models.own_calls import checked_output
from tests.support.models import CONFIG, with_choices
from tests.support.oracles import moe_oracle


@pytest.mark.parametrize("tokens,choices", [
    (1, {}), (7, {}), (40, {}), (1, {"num_shared_experts": 0}), (7, {"experts_per_token": 1}),
    (40, {"experts_per_token": 5}),
], ids=str)  # fmt: skip
def test_moe_equals_a_loop_with_all_gradients(tokens, choices):
    config = with_choices(**choices)
    layer = MoE(config, Local(config.num_experts), 0, StageOptions(seed=1)).double()
    x = torch.randn(tokens, config.hidden_size, dtype=torch.float64, requires_grad=True)
    outcomes = []
    for function in (layer, lambda v: moe_oracle(layer, v)):
        torch.manual_seed(0)
        y = function(x)
        y.backward(torch.randn_like(y))
        outcomes.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        layer.zero_grad()
        x.grad = None
    for ours, expected in zip(*outcomes, strict=True):
        expected = torch.zeros_like(ours) if expected is None else expected
        torch.testing.assert_close(ours, expected)


class Padded(Local):
    """Rows of NaN without experts follow the tokens, and their number is not known."""

    def prepare(self, expert_ids_TK):
        ids_NK = torch.cat([expert_ids_TK, torch.full((3, expert_ids_TK.shape[1]), -1)])
        return Route(self.num_experts, self.kernels, ids_NK, len(ids_NK), ids_NK.numel(), exact=False, padded=True)

    def dispatch(self, x_TD, route, weights_TK=None):
        padded = (t if t is None else nn.functional.pad(t, (0, 0, 0, 3), value=nan) for t in (x_TD, weights_TK))
        return Completed(Received(*padded))

    def combine(self, y_ND, route, weight_grads_NK=None):
        return Completed(Combined(*(t if t is None else t[:-3] for t in (y_ND, weight_grads_NK))))


def test_custom_experts_never_see_rows_past_the_received_ones():
    config = with_choices(experts="tests.models.test_moe:Doubling")
    outputs = []
    for ep in (Local(5), Padded(5)):
        torch.manual_seed(0)
        layer = MoE(config, ep, 0, StageOptions(seed=1))
        x = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(1)).requires_grad_()
        layer(x).sum().backward()
        outputs.append([layer.experts.seen, x.grad, layer.router.logits.weight.grad])
    assert outputs[0][0] == outputs[1][0]
    for ours, expected in zip(outputs[1][1:], outputs[0][1:], strict=True):
        torch.testing.assert_close(ours, expected)


class Doubling(nn.Module):
    """Experts without parameters that record their inputs."""

    def __init__(self, _config, _num_local_experts):
        super().__init__()
        self.seen: list[tuple[int, list[int]]] = []

    def forward(self, x_MD, expert_offsets):
        self.seen.append((len(x_MD), expert_offsets.tolist()))
        return 2 * x_MD


class Shrinking(Doubling):
    def forward(self, x_MD, expert_offsets):
        return super().forward(x_MD, expert_offsets)[:, :1]


class Unsummed(Doubling):
    takes_order = True

    def forward(self, x_ND, order, _weights_NK):
        return permute(x_ND, order)


def test_your_own_experts_replace_swiglu():
    config = with_choices(experts="tests.models.test_moe:Doubling", num_shared_experts=0)
    layer = MoE(config, Local(config.num_experts), 0)
    x = torch.randn(2, 3, config.hidden_size)
    torch.testing.assert_close(layer(x), 2 * x)  # weights sum to one
    assert isinstance(layer.experts, nn.Module)
    rows, offsets = layer.experts.seen[0]  # type: ignore[index]
    assert rows == offsets[-1] == 6 * config.experts_per_token
    with pytest.raises(ValueError, match=r"Shrinking must return \[12, 16\] in float32 on cpu: got \[12, 1\]"):
        MoE(with_choices(experts="tests.models.test_moe:Shrinking"), Local(5), 0)(x)
    with pytest.raises(ValueError, match=r"Unsummed must return \[6, 16\] in float32 on cpu: got \[12, 16\]"):
        MoE(with_choices(experts="tests.models.test_moe:Unsummed"), Local(5), 0)(x)


def test_under_autocast_an_output_may_have_its_dtype():
    for experts in ("swiglu", "tests.support.custom_experts:ListsOfStacks"):
        layer = MoE(with_choices(experts=experts), Local(5), 0)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(4, CONFIG.hidden_size)).shape == (4, CONFIG.hidden_size)
        on_meta = torch.empty(4, CONFIG.hidden_size, device="meta")  # a device without autocast
        assert checked_output("experts", layer, on_meta, on_meta) is on_meta


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
    ("tests.models.test_moe:Missing", "cannot find the expert layer '.*Missing': tests.models.test_moe has no Missing"),
    ("math:pi", "the expert layer 'math:pi' must be a class or a function: got float"),
    ("tests.models.test_moe:TooFew", r".* accept TooFew\(config, num_local_experts\) or .*: too many positional .*"),
    ("tests.models.test_moe:TooMany", ".* TooMany.config, num_local_experts. or .*: missing a .* argument: 'width'"),
    ("tests.models.test_moe:NoConstructor", ".* NoConstructor.config, num_local_experts. or .*: it has no constructor"),
])  # fmt: skip
def test_expert_layers_that_cannot_be_used(name, problem):
    with pytest.raises(ValueError, match=f"^{problem}$"):
        expert_class(with_choices(experts=name))
