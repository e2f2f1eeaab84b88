"""Each mistake in a custom layer is one line, with the file and line of the layer."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from moe_dualpipe.errors import user_error
from moe_dualpipe.models import ModelConfig, build_model, next_token_loss
from tests.support import broken_layers

FILE = Path(broken_layers.__file__)
CONFIG = ModelConfig(
    hidden_size=8, num_layers=2, num_dense_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, dense_size=8,
    expert_size=8, num_experts=3, num_shared_experts=0,
)  # fmt: skip
FP32 = "in float32 on cpu"

IN_MODEL = {
    "experts": {
        "Product": (".forward", "experts", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x8 and 3x3)"),
        "Inner": ("scaled", "experts", "KeyError: 'scale'"),
        "Double": (".forward", "experts", f"Double must return [16, 8] {FP32}: got [16, 8] in float64 on cpu"),
        "InBackward": ("_Fails.backward", "mlp backward", "RuntimeError: no gradient of [8]"),
        "Reset": (".reset_expert", "experts", "AttributeError: 'Reset' object has no attribute 'down'"),
        "function_fails": ("function_fails", "experts", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    },
    "router": {
        "FewTokens": (".forward", "router", "both [8, K]: got [7, 2] in float32 on cpu and [7, 2] in int64 on cpu"),
    },
    "attention": {
        "AttentionFlattens": (".forward", "attention", f"must return [2, 4, 8] {FP32}: got [8, 8] {FP32}"),
    },
    "block": {
        "BlockFails": (".segments", "block", "IndexError: between two segments"),
        "ForwardOfBlock": (".forward", "block", f"must return [2, 4, 8] {FP32}: got a list of 1"),
    },
}  # fmt: skip
"""For each part of the model, and each broken class: the function, the part that is named, and the message."""
CASES = [(part, name, *expected) for part, classes in IN_MODEL.items() for name, expected in classes.items()]


def marked_line(name):
    """The number of the line with the comment `# name`."""
    return next(i for i, line in enumerate(FILE.read_text().splitlines(), 1) if line.endswith(f"# {name}"))


def train_with(**layers):
    torch.manual_seed(1)
    model = build_model(dataclasses.replace(CONFIG, **layers))
    tokens_BS = torch.arange(8).view(2, 4)
    next_token_loss(model(tokens_BS), tokens_BS).backward()


@pytest.mark.parametrize("part,name,function,where,message", CASES, ids=[case[1] for case in CASES])
def test_an_error_in_a_layer_names_its_line(part, name, function, where, message):
    with pytest.raises(Exception) as caught:
        train_with(**{part: f"tests.support.broken_layers:{name}"})
    line = user_error(caught.value)
    layer = 0 if part in ("attention", "block") else 1
    function = name + function if function.startswith(".") else function
    place = re.escape(f"{FILE.relative_to(Path.cwd())}:{marked_line(name)} in {function}")
    assert line is not None and re.match(rf"{place} \(layer {layer}, ((mlp|attn) forward, )?{where}\): ", line)
    assert message in line
    assert "\n" not in line
    assert any(note.startswith(f"in layer {layer}") for note in caught.value.__notes__)
