"""Shapes of models: counts against built models, torch's counter, transformers and published numbers; config.json."""

import dataclasses
import json
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe_dualpipe.checkpoint.huggingface import read_config
from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.expert_parallel.parameters import expert_ids
from moe_dualpipe.models import PRESETS, ModelConfig, TransformerStage, build_model, next_token_loss, split
from moe_dualpipe.models.costs import shape_of, train_flops_per_token
from moe_dualpipe.models.shape import AttentionShape
from moe_dualpipe.tools.planner import read_shape
from moe_dualpipe.tools.planner.published_shapes import published_models, shape_of_config

AWKWARD = ModelConfig(
    vocab_size=37, hidden_size=20, num_layers=5, num_dense_layers=1, dense_layers=(3,), num_heads=6, num_kv_heads=3,
    head_dim=10, qk_norm="full", qkv_bias=True, out_bias=True, dense_size=7, expert_size=11, num_experts=5,
    experts_per_token=3, num_shared_experts=2, shared_gate=True, tied_embeddings=True, mtp_layers=2, router_bias=True,
)  # fmt: skip
LATENT = dataclasses.replace(
    AWKWARD, attention="mla", qk_norm="none", q_rank=9, kv_rank=5, rope_dim=4, value_dim=3,
    num_shared_experts=0, shared_gate=False, tied_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize("config", [
    *(dataclasses.replace(config, num_layers=config.num_dense_layers + 1) for config in PRESETS.values()),
    AWKWARD, LATENT, dataclasses.replace(LATENT, q_rank=0, mtp_layers=0, num_dense_layers=5),
], ids=[*PRESETS, "awkward", "latent", "dense"])  # fmt: skip
def test_a_shape_counts_the_parameters_of_the_model_that_is_built(config):
    with torch.device("meta"):
        stage = TransformerStage(config, split(config, 1)[0], Loopback(config.num_experts, 1))
    sizes, ids = {name: p.numel() for name, p in stage.named_parameters()}, expert_ids(stage)
    experts = sum(size for name, size in sizes.items() if name in ids)
    dense, shape = sum(sizes.values()) - experts, shape_of(config)
    assert (shape.dense_parameters, shape.expert_parameters) == (dense, experts)
    assert shape.active_parameters == dense + experts * config.experts_per_token // config.num_experts
    assert shape.embedding == sizes["embedding.weight"]


BATCH, LENGTH = 2, 7
SIZES = {
    "vocab_size": 11, "hidden_size": 12, "num_layers": 3, "num_heads": 4, "dense_size": 20, "expert_size": 5,
    "num_experts": 6, "experts_per_token": 2, "num_shared_experts": 2, "head_dim": 6,
}  # fmt: skip


@pytest.mark.parametrize("choices,widths", [
    ({"num_kv_heads": 2}, 12),
    ({"attention": "mla", "kv_rank": 7, "rope_dim": 2, "value_dim": 5, "q_rank": 3}, 13),
    ({"num_kv_heads": 2, "shared_gate": True, "qkv_bias": True, "rotary_fraction": 0.67, "tied_embeddings": True,
      "num_dense_layers": 0, "dense_layers": (1,), "yarn_factor": 2.0}, 12),
], ids=["gqa", "mla", "options"])  # fmt: skip
def test_flops_equal_those_of_torch_without_masked_scores(choices, widths):
    """The math backend computes all S scores of a position; (S + 1) / 2 of them count."""
    config = ModelConfig(**SIZES, **choices)
    model, tokens = build_model(config).double(), torch.randint(11, (BATCH, LENGTH))
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = next_token_loss(model(tokens), tokens)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    masked = config.num_layers * config.num_heads * widths * (LENGTH - 1)
    expected = BATCH * LENGTH * (shape_of(config).forward_flops(LENGTH) + masked)
    assert (forward.get_total_flops(), backward.get_total_flops()) == (expected, 2 * expected)
    assert train_flops_per_token(config, LENGTH) == 3 * shape_of(config).forward_flops(LENGTH)


def test_mtp_flops_equal_those_of_torch():
    config = ModelConfig(**SIZES, num_kv_heads=2, mtp_layers=2)
    model, tokens = build_model(config).double(), torch.randint(11, (BATCH, LENGTH))
    output = model(tokens).detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as loss:
        model.loss(output, tokens)
    masked = sum(config.num_heads * 12 * n * (n - 1) for n in (LENGTH - 1, LENGTH - 2))
    head = LENGTH * 2 * config.hidden_size * config.vocab_size
    assert loss.get_total_flops() == BATCH * (head + shape_of(config).mtp_flops(LENGTH) + masked)
    train = 3 * (LENGTH * shape_of(config).forward_flops(LENGTH) + shape_of(config).mtp_flops(LENGTH))
    assert 0 <= train - LENGTH * train_flops_per_token(config, LENGTH) < 3 * LENGTH


@pytest.mark.parametrize("seq_len", [1, 2, 5, 300])
@pytest.mark.parametrize("window", [0, 1, 2, 7, 300, 301])
def test_pairs_of_a_window_equal_those_of_a_mask(window, seq_len):
    attention = AttentionShape("gqa", 4, 2, 6, 10, window=window)
    seen = [[k <= q and (not window or q - k < window) for k in range(seq_len)] for q in range(seq_len)]
    assert attention.pairs(seq_len) == sum(map(sum, seen))
    assert attention.score_flops(seq_len) == 4 * 2 * (6 + 10) * sum(map(sum, seen)) // seq_len


BILLIONS = {
    # Numbers of parameters: all, and those of a token. The source of each is where they were published.
    "llama2-7b": (6.738, 6.738), "llama2-13b": (13.016, 13.016), "llama2-70b": (68.977, 68.977),
    "llama3-8b": (8.030, 8.030), "llama3-70b": (70.554, 70.554), "llama3.1-405b": (405.853, 405.853),
    "mixtral-8x7b": (46.703, 12.88), "mixtral-8x22b": (140.62, 39.15),
    "moonlight-16b-a3b": (15.96, None), "qwen3-30b-a3b": (30.53, 3.34), "qwen3-235b-a22b": (235.1, 22.1),
    "deepseek-v2": (235.74, 21.4), "deepseek-v2-lite": (15.706, 2.66), "deepseek-v3": (671.03, 37.5),
    "kimi-k2": (1026.4, 32.9), "glm-4.5": (355, None), "glm-4.5-air": (106, None), "dbrx": (131.6, 36.5),
    "olmoe-1b-7b": (6.919, 1.28), "nemotron-4-340b": (341.0, 341.0), "megascale-352b": (352, None),
    "gpt3-175b": (174.6, 174.6), "gpt-oss-20b": (20.91, 3.61 + 0.579), "gpt-oss-120b": (116.83, 5.13 + 0.579),
}  # fmt: skip
"""Billions of parameters, all and those that a token uses, from model cards, papers and the indices of weights. The
paper of gpt-oss leaves out the embedding of 0.579."""


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_of_published_models(name):
    shape, (total, active) = read_shape(name), BILLIONS[name]
    assert shape.parameters == pytest.approx(total * 1e9, rel=0.01)
    assert active is None or shape.active_parameters == pytest.approx(active * 1e9, rel=0.01)


@pytest.mark.parametrize("name", [name for name in published_models() if name.startswith("gpt-") and name[4] != "o"])
def test_gpts_equal_the_formulas_of_their_paper(name):
    """arXiv 2104.04473, sections 5.1: P = 12 l h^2 (1 + 13/12h + (V+s)/12lh), F = 96 s l h^2 (1 + s/6h + V/16lh).

    F counts the recomputed forward, not of the head, and attention that is not causal.
    """
    shape = read_shape(name)
    h, n, v, s = shape.hidden, len(shape.layers), shape.vocab, shape.learned_positions
    assert shape.parameters == 12 * n * h**2 + 2 * n * h + (v + s) * h + h  # two norms of a block, and the last one
    full = shape.forward_flops(s) - shape.head.flops + shape.score_flops(s) * (s - 1) // (s + 1)
    assert 4 * full + 3 * shape.head.flops == 96 * n * h**2 + 16 * n * h * s + 6 * h * v
    assert shape.parameters / 1e9 == pytest.approx(float(name[4:].removesuffix("b")), abs=0.06)


def test_flops_per_token_are_those_of_a_published_run():
    """arXiv 2505.11432, table 3: 272.9 k tokens/s on 240 H800, whose peak is 989 TFLOP/s, are 32.48% MFU."""
    assert 272_900 / 240 * read_shape("megascale-352b").train_flops(8192) / 989.4e12 == pytest.approx(0.3248, rel=0.01)


# ---- Configurations of published models: parameters against transformers' models, forms of keys, and errors ----


DENSE = [
    "llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "olmo3", "glm4", "gpt2", "phi", "phi3", "gemma", "gemma2",
    "gemma3_text", "ernie4_5", "granite", "smollm3", "seed_oss", "cohere", "cohere2", "starcoder2", "falcon", "mpt",
    "opt", "bloom", "gpt_neox", "gptj", "gpt_bigcode", "arcee", "apertus", "helium",
    "codegen", "jais2", "nanochat", "persimmon",
]  # fmt: skip
EXPERTS = [
    "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "olmoe", "flex_olmo", "gpt_oss",
    "phimoe", "ernie4_5_moe", "minimax_m2", "granitemoe", "granitemoeshared", "llama4_text", "solar_open",
]  # fmt: skip
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10, "intermediate_size": 6}


@pytest.mark.parametrize("kind", DENSE + EXPERTS)
@pytest.mark.long
def test_parameters_equal_those_of_transformers(kind):
    """Of the default configuration of each architecture, which leaves out nothing that its class has a default for."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind)
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    number = sum(p.numel() for p in model.parameters())
    keys = {**config.to_dict(), "num_nextn_predict_layers": 0}  # transformers does not build these
    assert shape_of_config(keys, kind).parameters == pytest.approx(number, rel=0.012)  # norms and biases


REAL = json.loads((Path(__file__).parents[2] / "support" / "published_configs.json").read_text())


FROM_CARDS = {
    # Billions of parameters as on the model's page on Hugging Face, and the sizes in its config.json.
    "Llama-3.2-1B": (1.24, {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
        "tie_word_embeddings": True}),
    "gemma-2-9b": (9.24, {
        "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
        "sliding_window": 4096}),
    "Phi-3.5-MoE-instruct": (41.9, {
        "model_type": "phimoe", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 6400, "vocab_size": 32064, "num_local_experts": 16,
        "num_experts_per_tok": 2, "attention_bias": True}),
    "Llama-4-Maverick, its text model": (400, {"model_type": "llama4", "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "vocab_size": 202048, "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8192}}),
    "Qwen2-57B-A14B": (57.4, {
        "model_type": "qwen2_moe", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480, "num_experts": 64, "num_experts_per_tok": 8,
        "decoder_sparse_step": 1, "vocab_size": 151936}),
    "Hunyuan-A13B": (80.4, {
        "model_type": "hunyuan_v1_moe", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "attention_head_dim": 128, "intermediate_size": 3072,
        "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "num_experts": 64, "num_shared_expert": [1] * 32,
        "vocab_size": 128167, "tie_word_embeddings": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", FROM_CARDS)
def test_parameters_of_models_of_other_families(name):
    billions, config = FROM_CARDS[name]
    assert shape_of_config(config, name).parameters / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize("file,billions,named", [
    ("OLMoE-1B-7B-0924", 6.919, "olmoe-1b-7b"), ("Qwen3-30B-A3B", 30.532, "qwen3-30b-a3b"),
    ("Mixtral-8x7B-v0.1", 46.703, "mixtral-8x7b"), ("DeepSeek-V2-Lite", 15.706, "deepseek-v2-lite"),
    ("DeepSeek-V3", 682.6, "deepseek-v3"), ("Qwen1.5-MoE-A2.7B", 14.316, None), ("GLM-4.5-Air", 109.3, "glm-4.5-air"),
])  # fmt: skip
def test_real_configurations(file, billions, named):
    """Those of DeepSeek-V3 and GLM-4.5-Air have a module of multi-token prediction, which their models by name lack."""
    shape = shape_of_config(REAL[file], file)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    if named:
        assert shape.layers == read_shape(named).layers
        assert dataclasses.replace(shape, mtp=0).parameters == read_shape(named).parameters


def test_names_of_presets_published_models_and_files(tmp_path):
    assert read_shape("qwen3-30b-a3b") == shape_of(PRESETS["qwen3-30b-a3b"], "qwen3-30b-a3b")
    assert not {*published_models()} & {*PRESETS}
    assert read_shape("GLM-4.5") == read_shape("glm-4.5")
    assert all(config["source"] for config in published_models().values())
    (tmp_path / "config.json").write_text(json.dumps(published_models()["dbrx"]))
    (tmp_path / "other.json").write_text(json.dumps(published_models()["dbrx"]))
    for path, name in ((tmp_path, tmp_path.name), (str(tmp_path / "other.json"), "other")):
        assert read_shape(path) == dataclasses.replace(read_shape("dbrx"), name=name)


CONFIG = {**SMALL, "model_type": "mine", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3}


@pytest.mark.parametrize("keys,routed", [
    ({}, [0, 1, 2, 3]), ({"first_k_dense_replace": 1}, [1, 2, 3]), ({"mlp_only_layers": [2]}, [0, 1, 3]),
    ({"decoder_sparse_step": 2}, [1, 3]), ({"moe_layer_freq": [0, 1, 1, 0]}, [1, 2]), ({"moe_layers": [1]}, [1]),
    ({"interleave_moe_layer_step": 3}, [2]),
    ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}, [1, 2]), ({"num_experts": 1}, []),
    ({"num_experts": 0}, []),
], ids=str)  # fmt: skip
def test_which_layers_have_experts(keys, routed):
    shape = shape_of_config(CONFIG | {"num_hidden_layers": 4} | keys, "mine")
    assert [i for i, layer in enumerate(shape.layers) if layer.experts] == routed
    assert {(layer.experts, layer.dense_size) for layer in shape.layers} <= {(4, 0), (0, 6)}


@pytest.mark.parametrize("keys,windows", [
    ({}, [5, 5, 5, 5]), ({"use_sliding_window": False}, [0, 0, 0, 0]), ({"sliding_window": None}, [0, 0, 0, 0]),
    ({"layer_types": ["sliding_attention", "full_attention"] * 2}, [5, 0, 5, 0]),
    ({"sliding_window_pattern": 3}, [5, 5, 0, 5]), ({"model_type": "gemma2"}, [5, 0, 5, 0]),
    ({"sliding_window": None, "attention_chunk_size": 9}, [9, 9, 9, 9]),
], ids=str)  # fmt: skip
def test_which_layers_have_windows(keys, windows):
    shape = shape_of_config(CONFIG | {"num_hidden_layers": 4, "sliding_window": 5} | keys, "mine")
    assert [layer.attention.window for layer in shape.layers] == windows


def test_a_family_that_this_project_trains_is_read_as_for_its_weights():
    shape = shape_of_config(REAL["DeepSeek-V3"], "mine")
    assert shape == shape_of(read_config(REAL["DeepSeek-V3"]), "mine")
    assert (shape.layers[-1].groups, shape.layers[-1].top_groups) == (8, 4)
    with pytest.raises(ValueError, match="sliding_window 4096 is not supported"):
        shape_of_config(REAL["Mixtral-8x7B-v0.1"] | {"sliding_window": 4096}, "mine")
    with pytest.raises(ValueError, match="kv_lora_rank says that the model has latent attention"):
        shape_of_config(CONFIG | {"kv_lora_rank": 4}, "mine")


REFUSED = {
    "hidden_size": (None, 0, 8.0), "num_attention_heads": (0, ["a", 2]), "num_hidden_layers": ("4", 10_001, 0),
    "moe_intermediate_size": (0,), "num_key_value_heads": (0,), "vocab_size": (-3,), "num_experts_per_tok": (None,),
    "layer_types": ([["a"], "b"], ["linear_attention"] * 2, ["full_attention"] * 3), "moe_layer_freq": ([0, 1, 1],),
    "mlp_layer_types": (["dense"] * 3,), "mlp_only_layers": ([{}],), "index_topk": (2048,),
    "attention heads": ({"num_attention_heads": 4, "num_key_value_heads": 3}, {"num_attention_heads": 9}),
    "experts": ({"num_experts_per_tok": 5}, {"model_type": "jetmoe"}),
    "conv_L_cache": (3,), "hybrid_override_pattern": ("M-",), "kv_lora_rank": (4,),
}  # fmt: skip


@pytest.mark.parametrize("key,value", [(key, value) for key, values in REFUSED.items() for value in values], ids=str)
def test_a_configuration_that_cannot_be_read_is_one_line_that_names_the_file_and_the_key(key, value, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG | (value if isinstance(value, dict) else {key: value})))
    with pytest.raises(ValueError) as error:
        read_shape(file)
    text = str(error.value)
    assert text.startswith(f"cannot read {file}: ") and key in text and "\n" not in text


@pytest.mark.parametrize("name,said", [
    ("deepsek-v3", r"unknown model 'deepsek-v3'; did you mean 'deepseek-v3'.*; or give a config\.json"),
    ("deepseek-ai/DeepSeek-V3", r"cannot read deepseek-ai/DeepSeek-V3: .* a local folder with one \(hf download\)"),
    (".", r"cannot read config\.json: there is no such file"), ("", "unknown model ''; choose from: tiny"),
    ("x.json", r"cannot read x\.json: there is no such file"), ("text.json", r"text\.json: it is not JSON"),
])  # fmt: skip
def test_unknown_names(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.json").write_text("model_type: llama")
    with pytest.raises(ValueError, match=said):
        read_shape(name)
