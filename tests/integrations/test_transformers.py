"""Our experts inside models of Hugging Face transformers: equal to its "eager" loop, or an error that says why not."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
    models,
)

from moe_dualpipe.integrations.transformers import experts_forward, register
from tests.support.kernels import DEVICE, error

GptOssExperts = models.gpt_oss.modeling_gpt_oss.GptOssExperts
MuseSparkTextConfig = models.muse_spark.configuration_muse_spark.MuseSparkTextConfig
MuseSparkExperts = models.muse_spark.modeling_muse_spark.MuseSparkExperts
NemotronHExperts = models.nemotron_h.modeling_nemotron_h.NemotronHExperts
Qwen3MoeExperts = models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts_per_tok": 2, "initializer_range": 0.3, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
GROUPED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
CONFIGS = [
    Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=12, norm_topk_prob=True),
    OlmoeConfig(**SIZES, num_experts=5),
    DeepseekV3Config(**SIZES | {"num_key_value_heads": 2}, **LATENT, **GROUPED, moe_intermediate_size=12),
    MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
]


def model(config, implementation, dtype=torch.float32):
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(config, experts_implementation=implementation).to(DEVICE, dtype)
    assert made.config._experts_implementation == implementation
    return made


def outcome(made, ids):
    """The logits, and the gradient of every parameter."""
    output = made(ids, labels=ids)
    output.loss.backward()
    return {"logits": output.logits} | {name: p.grad for name, p in made.named_parameters() if p.requires_grad}


def assert_equal_to_eager(config, implementation, dtype, allowed):
    ids = torch.randint(0, SIZES["vocab_size"], (1, 4), device=DEVICE)
    expected, ours = (outcome(model(config, name, dtype), ids) for name in ("eager", implementation))
    assert expected.keys() == ours.keys()
    assert sum("experts." in name for name in ours) >= 2
    for name, value in expected.items():
        assert value.norm() > 0, name
        assert error(ours[name], value) <= allowed, name


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_logits_and_gradients_in_plain_torch(config):
    assert_equal_to_eager(config, register(), torch.float64, 1e-13)


@pytest.mark.parametrize("config", CONFIGS[:3:2], ids=lambda config: config.model_type)
@pytest.mark.quick("qwen3_moe")
def test_a_model_is_one_graph_of_torch_compile_with_the_same_logits_and_gradients(config):
    """As with transformers' grouped_mm."""
    torch._dynamo.reset()
    made, ids = model(config, register()), torch.randint(0, SIZES["vocab_size"], (1, 4), device=DEVICE)
    expected = outcome(made, ids)
    made.zero_grad()
    found = outcome(torch.compile(made, backend="aot_eager", fullgraph=True), ids)
    for name, value in expected.items():
        torch.testing.assert_close(found[f"_orig_mod.{name}" if name != "logits" else name], value)


def test_a_model_is_exported_with_the_same_logits():
    made, ids = model(CONFIGS[0], register()).eval(), torch.randint(0, SIZES["vocab_size"], (1, 4), device=DEVICE)
    program = torch.export.export(made, (ids,), {"use_cache": False})
    torch.testing.assert_close(program.module()(ids, use_cache=False).logits, made(ids).logits)


def test_another_activation_is_refused_when_the_model_is_built():
    config = Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=12, hidden_act="gelu")
    for name in (register(), register("other", kernels="reference")):
        with pytest.raises(ValueError, match=f"{name!r} does not support .*activation GELUActivation, not SiLU"):
            model(config, name)
        model(config, "eager")


def test_ids_of_other_ranks_contribute_nothing():
    """In transformers' expert parallelism, a rank gets the id `num_experts` for experts of other ranks."""
    config = CONFIGS[0].__class__(**CONFIGS[0].to_dict(), experts_implementation="eager")
    experts = Qwen3MoeExperts(config).double().to(DEVICE)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    experts._is_expert_parallel = True
    for ids in ([[0, 4], [4, 4], [3, 0]], [[4, 4]] * 3, []):
        ids_NK = torch.tensor(ids, device=DEVICE, dtype=torch.int64).view(-1, 2)
        x, weights = (torch.randn(len(ids), n, dtype=torch.float64, device=DEVICE, requires_grad=True) for n in (16, 2))
        inputs = [x, weights, *experts.parameters()]
        expected, ours = experts(x, ids_NK, weights), experts_forward(experts, x, ids_NK, weights)
        torch.testing.assert_close(ours, expected)
        graph = 0 * sum(t.sum() for t in inputs)  # the loop of eager has none if no token has an expert here
        dy = torch.randn_like(ours)
        ours, expected = (torch.autograd.grad(y + graph, inputs, dy, retain_graph=True) for y in (ours, expected))
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    "experts_class,config,reasons",
    [
        (
            GptOssExperts,
            GptOssConfig(num_local_experts=4, hidden_size=16, intermediate_size=8),
            "has_bias=True: biases; is_transposed=True: weights stored as [E, in, out]; "
            "is_concatenated=False: rows of gate and up alternate; its own _apply_gate",
        ),
        (
            Qwen3MoeExperts,
            Qwen3MoeConfig(num_experts=4, hidden_size=16, moe_intermediate_size=8, hidden_act="gelu"),
            "activation GELUActivation, not SiLU",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unsupported_experts(experts_class, config, reasons):
    x, ids, weights = torch.randn(3, 16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    config._experts_implementation = register()
    with torch.device("meta"):
        experts = experts_class(config)
    with pytest.raises(ValueError) as raised:
        experts(x, ids, weights)
    name = experts_class.__name__
    start = "experts_implementation='moe_dualpipe' does not support "
    assert str(raised.value) == f"{start}{name} ({reasons}): use 'grouped_mm' or 'eager'"


def test_the_page_prints_what_is_written_below_its_code(capsys):
    page = (Path(__file__).parents[2] / "docs" / "python_api.md").read_text()
    ((code, printed),) = re.findall(
        r"```python\n((?:(?!```).)*register\(\)\)(?:(?!```).)*)```\n\n```\n(.*?)```", page, re.DOTALL
    )
    exec(code, {})
    assert capsys.readouterr().out == printed
