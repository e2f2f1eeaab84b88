"""The config.json of published models: equal to the presets, and written back unchanged.

tests/support/published_configs.json has the values of these files, entered by hand.
"""

import dataclasses
import json

import pytest

from moe_dualpipe.checkpoint.huggingface import ARCHITECTURES, read_config, write_config
from moe_dualpipe.checkpoint.huggingface.architectures import REQUIRED
from moe_dualpipe.checkpoint.huggingface.config import architecture_of, different_options
from moe_dualpipe.models import preset
from tests.support.runs import ROOT

CONFIGS = json.loads((ROOT / "tests/support/published_configs.json").read_text())
PRESETS = {
    "OLMoE-1B-7B-0924": "olmoe-1b-7b", "Qwen3-30B-A3B": "qwen3-30b-a3b", "Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "DeepSeek-V2-Lite": "deepseek-v2-lite", "DeepSeek-V3": "deepseek-v3",
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_published_models_without_yarn_and_mtp(name):
    found = read_config(CONFIGS[name])
    found = dataclasses.replace(found, yarn_factor=1.0, mtp_layers=0)
    assert different_options(found, preset(PRESETS[name])) == []


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_what_was_published(name):
    published = CONFIGS[name]
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
