"""`check parallel MODEL`: transformers' own division of a model agrees with the whole, and a planted fault is named."""

from importlib.util import find_spec

import pytest
import torch

from moe_dualpipe.cli import main
from moe_dualpipe.tools.checks import check_transformers

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = MixtralConfig(vocab_size=64, num_key_value_heads=2, head_dim=8, num_local_experts=4, **sizes)
    MixtralForCausalLM(config).save_pretrained(path)
    return str(path)


def double_expert_gradients(model):
    """As each rank adds up what is already a sum. FSDP gives its shards their gradients without hooks."""
    for name, parameter in model.named_parameters():
        if "layers.1.mlp.experts.down" in name:
            parameter.register_hook(lambda grad: 2 * grad)


def scale_attention(model):
    """In the second layer, each rank adds the output of both."""
    attention = model.model.layers[1].self_attn
    attention.register_forward_hook(lambda _module, _inputs, output: (2 * output[0], *output[1:]))


@pytest.mark.long
def test_a_model_of_transformers_passes(folder, capsys):
    assert main(["check", "parallel", folder, "--seq-len", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4 sequences of 8 tokens, compared with one process" in lines[0]
    assert [line.split("  ")[0] for line in lines[2:]] == ["tp=2", "tp=2 x ep=2", "fsdp=2 x ep=2", "3 passed"]


@pytest.mark.long
@pytest.mark.parametrize("change,number,said", [
    (double_expert_gradients, 2, "gradients differ by 1, above the tolerance of 4.5e-06: model.layers.1.mlp.experts."),
    (scale_attention, 3, "the first difference is in the output of model.layers.1.self_attn: "),
])  # fmt: skip
def test_a_fault_of_the_divided_model_is_named(folder, change, number, said):
    checks = check_transformers(folder, 8, change=change).checks
    assert [check.status for check in checks] == ["failed"] * number + ["passed"] * (3 - number)
    assert all(said in check.problem for check in checks[:number]), checks


def test_what_transformers_cannot_load_is_one_line(tmp_path, capsys):
    assert main(["check", "parallel", str(tmp_path / "absent" / "model")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("moe-dualpipe: error: cannot load ") and error.count("\n") == 1
