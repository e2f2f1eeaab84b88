"""Greedy generation of imported and exported models gives the tokens of transformers."""

import pytest
import torch

from moe_dualpipe import generate
from moe_dualpipe.checkpoint.huggingface import from_pretrained, save_pretrained
from tests.support.published import CONFIGS, random_model, save, transformers_model

PROMPTS_BS = torch.randint(37, (3, 5), generator=torch.Generator().manual_seed(2))
TOKENS, SEED = 40, 3


def generate_with_transformers(model):
    with torch.no_grad():
        tokens_BS = model.generate(
            PROMPTS_BS, attention_mask=torch.ones_like(PROMPTS_BS), max_new_tokens=TOKENS, do_sample=False
        )
    return tokens_BS[:, PROMPTS_BS.shape[1] :]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.quick("olmoe biased, dynamic", "deepseek_v3")
def test_an_imported_model_generates_the_tokens_of_transformers(name, tmp_path):
    theirs = random_model(name, SEED)
    ours = from_pretrained(save(theirs, tmp_path / "saved"))
    expected_BN = generate_with_transformers(theirs)
    assert len(expected_BN.unique()) > 5  # not one token again and again
    assert torch.equal(generate(ours, PROMPTS_BS, TOKENS, 64, temperature=0.0), expected_BN)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_transformers_generates_the_tokens_of_a_changed_model_after_export(name, tmp_path):
    ours = from_pretrained(save(random_model(name, SEED), tmp_path / "saved"))
    before_BN = generate(ours, PROMPTS_BS, TOKENS, 64, temperature=0.0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(1 + 0.2 * torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    changed_BN = generate(ours, PROMPTS_BS, TOKENS, 64, temperature=0.0)
    assert not torch.equal(changed_BN, before_BN)
    save_pretrained(ours, tmp_path / "changed")
    theirs = transformers_model(tmp_path / "changed", torch.float32)
    assert torch.equal(generate_with_transformers(theirs), changed_BN)
