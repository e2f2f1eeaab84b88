"""config.json decides what a model computes: each change is refused, or has the same effect as in transformers."""

import dataclasses
import json
import logging

import pytest
import torch

from moe_dualpipe.checkpoint.huggingface import (
    ARCHITECTURES,
    PublishedModel,
    from_pretrained,
    read_config,
    write_config,
)
from moe_dualpipe.checkpoint.huggingface.architectures import REQUIRED
from moe_dualpipe.checkpoint.huggingface.config import architecture_of, different_options
from moe_dualpipe.models import preset
from tests.support.mutations import check_message, mutations
from tests.support.published import CONFIGS, ROPES, exact, random_model, rope, save
from tests.support.runs import ROOT

transformers = pytest.importorskip("transformers")
TOKENS_BS = torch.randint(37, (2, 19), generator=torch.Generator().manual_seed(0))
CHANGES = ("null", "true", "false", "0", "1", "2", "-1", "0.5", "4.0", '"relu"', '"yarn"', "[]", "[1]", "{}", "64")
NO_EFFECT = {
    "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "max_position_embeddings", "output_router_logits",
    "router_aux_loss_coef", "use_cache", "pretraining_tp", "max_window_layers", "transformers_version", "architectures",
}  # fmt: skip
"""Keys that do not describe the model."""


def saved_model(name, folder):
    """A model of transformers, its folder, and its config.json."""
    with exact(torch.float64):
        model = random_model(name, dtype=torch.float64)
    save(model, folder)
    return model, folder, json.loads((folder / "config.json").read_text())


def keys_read(kind):
    """The keys of an architecture, and those that the code of transformers or this project reads from its config."""
    model, found = random_model(kind), set()

    class Recorded(type(model.config)):
        def __getattribute__(self, key):
            if not callable(getattr(type(self), key, None)) and not key.startswith("base_model_"):
                found.add(key)
            return super().__getattribute__(key)

    config = Recorded(**model.config.to_dict())
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    type(model)(config).eval()(TOKENS_BS)
    one = ARCHITECTURES[kind]
    return found | {*config.to_dict(), *one.fixed} | {name for key in one.keys for name in (key.key, key.also)}


@pytest.fixture(scope="module")
def every_key():
    """The keys of all architectures: what one of them reads may also be in the config.json of another."""
    found = set().union(*map(keys_read, ARCHITECTURES))
    assert {"is_causal", "rope_interleave", "per_layer_config"} < found
    return sorted(key for key in found | {"rope_scaling"} if key and not key.startswith("_"))


def logits(model):
    with torch.no_grad():
        return model.logits(model(TOKENS_BS))


def their_logits(model, config):
    """The logits that transformers computes with these weights and another config; None if it refuses the config."""
    logging.disable()
    try:
        changed = type(model.config).from_dict(json.loads(json.dumps(config)))
        if changed.num_hidden_layers > 9:
            return None
        changed._attn_implementation, changed._experts_implementation = "sdpa", "eager"
        with exact(torch.float64), torch.no_grad():
            other = type(model)(changed).double().eval()
            other.load_state_dict(model.state_dict())
            return other(TOKENS_BS).logits
    except Exception:
        return None
    finally:
        logging.disable(logging.NOTSET)


def with_fractions(config):
    """Whole numbers as floats, where transformers insists on floats."""
    keys = {"rms_norm_eps", "initializer_range", "routed_scaling_factor", "attention_dropout", "router_jitter_noise"}
    return {key: float(value) if key in keys and type(value) is int else value for key, value in config.items()}


class Law:
    """With any config.json, a folder is refused, or has the logits of transformers with the same config.json."""

    def __init__(self, saved):
        self.theirs, self.folder, self.config = saved
        self.before, self.expected, self.counts = PublishedModel(self.folder), logits(from_pretrained(self.folder)), {}

    def check(self, path, what, text):
        result = self.outcome(path, what, text)
        self.counts[result] = self.counts.get(result, 0) + 1

    def outcome(self, path, what, text):
        """`path`: the changed key. Returns whether the change is refused, and else whether it changes the model."""
        (self.folder / "config.json").write_text(text)
        try:
            published = PublishedModel(self.folder)
            same = (published.config, published.layout) == (self.before.config, self.before.layout)
            ours = self.expected if same else logits(from_pretrained(self.folder))
        except ValueError as error:
            check_message(error, 2500)
            return "refused"
        changed = json.loads(text)  # of a repeated key, the last value counts, here as in transformers
        if (theirs := their_logits(self.theirs, with_fractions(changed))) is not None:
            assert (ours - theirs).abs().max() < 1e-9 * theirs.abs().max(), what
        else:  # transformers insists on a type: the value must mean "off", as before, or a default
            off = what.endswith((" = null", " = 0", " = false", " = []", " = {}", " removed", " twice"))
            unused = path in NO_EFFECT or path not in self.config
            unused |= path == "sliding_window" and changed.get("use_sliding_window") is False
            assert same and (off or unused), what
        return "unchanged" if same else "changed"


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.quick("deepseek_v2")
def test_flags_and_rotations_are_refused_or_mean_what_they_mean_in_transformers(kind, tmp_path, every_key):
    law = Law(saved_model(kind, tmp_path / "saved"))
    for key in every_key:
        if isinstance(law.config.get(key, False), bool):
            for value in (True, False):
                law.check(key, f"{key} = {json.dumps(value)}", json.dumps({**law.config, key: value}))
    assert law.counts["refused"] > 20 and law.counts["unchanged"] > 20, law.counts
    for name in {*ROPES} - {"default"}:
        changed = {**law.config, "max_position_embeddings": 11, "rope_parameters": rope(name)}
        assert law.outcome("rope_parameters", name, json.dumps(changed)) == "changed"


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_any_value_is_refused_or_means_what_it_means_in_transformers(name, tmp_path, every_key):
    law = Law(saved_model(name, tmp_path / "saved"))
    for what, text in mutations(law.config, CHANGES):
        law.check(what.split("'")[1] if "'" in what else "", what, text)
    for key in {*every_key} - law.config.keys():
        for value in CHANGES:
            law.check(key, f"{key} = {value}", json.dumps({**law.config, key: json.loads(value)}))
    assert law.counts["refused"] > 200 and law.counts["changed"] > 2, law.counts


UNKNOWN = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 16, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "attention_sink": True, "attention_window": 128, "head_bias": True,
    "lm_head_bias": True, "mup_width": 4.0, "zero_expert_num": 2, "rotary_pct": 0.5, "index_topk": 2048,
    "original_max_position_embeddings": 32, "swiglu_limit": 7.0, "residual_dropout": 0.1,
    "compression_config": {"a": 1},
}  # fmt: skip


@pytest.mark.parametrize("key", UNKNOWN)
def test_unknown_keys_that_could_change_the_model_are_refused(key):
    config, factor = random_model("deepseek_v3").config.to_dict(), key.endswith(("multiplier", "scaling"))
    for value in (UNKNOWN[key], 0) if factor else (UNKNOWN[key],):  # multiplied by 0
        with pytest.raises(ValueError, match=key):
            read_config({**config, key: value})
    read_config({**config, key: 1.0 if factor else None, "license": "mit", "id2label": {"0": "a"}, "pruned_heads": {}})


RESTATED = {
    "olmoe": {"use_qk_norm": True, "qk_norm": True, "moe_layer_freq": 1, "n_group": 1},
    "qwen3_moe": {"use_qk_norm": True, "qkv_bias": False, "decoder_sparse_step": 1},
    "mixtral": {"norm_topk_prob": True, "decoder_sparse_step": 1, "use_qk_norm": False},
    "deepseek_v3": {"moe_router_dtype": "float32", "decoder_sparse_step": 1, "use_qk_norm": False},
    "glm4_moe": {"moe_router_dtype": "fp32", "moe_layer_freq": 1, "scoring_func": "sigmoid"},
}


@pytest.mark.parametrize("kind,key", [(kind, key) for kind, keys in RESTATED.items() for key in keys])
def test_a_key_that_says_what_the_architecture_does_loads_and_another_value_does_not(kind, key):
    config, value = random_model(kind).config.to_dict(), RESTATED[kind][key]
    config.pop(key, None)
    assert read_config({**config, key: value}) == read_config({**config, key: None}) == read_config(config)
    for other in (not value,) if isinstance(value, bool) else ("bfloat16", 3):
        if key != "decoder_sparse_step" or kind != "qwen3_moe":  # which reads it
            with pytest.raises(ValueError, match=key):
                read_config({**config, key: other})


@pytest.mark.parametrize("changes,problem", [
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: only 'silu'"),
    ({"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported: only 0.0"),
    ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with 'sliding_attention' is not supported"),
    ({"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries for 3 layers"),
    ({"clip_qkv": 8.0}, "clip_qkv 8.0"),
    ({"num_attention_heads": "8"}, "num_attention_heads must be a whole number: got '8'"),
    ({"rms_norm_eps": None}, "it has no rms_norm_eps"),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 8.0}},
     "the rotary embedding 'longrope' is not supported: only default, linear, dynamic, llama3, yarn"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "its rotary embedding 'llama3' has no original_max"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 8.0, "beta_fast": 3}},
     "beta_fast of the rotary embedding 'linear' is not supported"),
    ({"num_key_value_heads": 1}, "num_key_value_heads 1 contradicts other sizes: only 3"),
    ({"is_causal": False}, "is_causal False is not supported: only True"),
    ({"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": {"type": "default"}},
     "rope_parameters and rope_scaling must be one object"),
    ({"rope_theta": 3e4, "rope_parameters": {"rope_theta": 2e4}}, "rope_theta 30000.0 contradicts that of rope_param"),
    ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' is not supported: supported are mixtral, olmoe, qwen2_moe, "),
])  # fmt: skip
def test_what_this_model_cannot_express_is_named(changes, problem):
    kind = "deepseek_v3" if "num_key_value_heads" in changes else "olmoe"
    with pytest.raises(ValueError) as error:
        read_config({**random_model(kind).config.to_dict(), **changes})
    assert problem in str(error.value)


PUBLISHED = json.loads((ROOT / "tests/support/published_configs.json").read_text())
PRESETS = {
    "OLMoE-1B-7B-0924": "olmoe-1b-7b", "Qwen3-30B-A3B": "qwen3-30b-a3b", "Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "DeepSeek-V2-Lite": "deepseek-v2-lite", "DeepSeek-V3": "deepseek-v3",
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_published_models_without_yarn_and_mtp(name):
    found = read_config(PUBLISHED[name])
    found = dataclasses.replace(found, yarn_factor=1.0, mtp_layers=0)
    assert different_options(found, preset(PRESETS[name])) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_is_what_was_published(name):
    published = PUBLISHED[name]
    written = write_config(read_config(published), architecture_of(published))
    same = {key: value for key, value in published.items() if key in written and key != "max_position_embeddings"}
    assert len(same) > 15
    for key, value in same.items():
        if key != "rope_scaling" or value is None:
            assert written[key] == value, key
        else:
            assert {**written[key], **value} == written[key]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_transformers_leaves_out_has_its_default(kind):
    """Every key with a default has the one that the class of transformers has."""
    name = ARCHITECTURES[kind].class_name.replace("ForCausalLM", "Config")
    theirs = getattr(pytest.importorskip("transformers"), name)()
    for key in ARCHITECTURES[kind].keys:
        if key.default is not REQUIRED and hasattr(theirs, key.key):
            assert (getattr(theirs, key.key) or key.default) == key.default or key.null, key.key
