"""With a document mask, a document in a packed window gives the same result as it does alone."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from moe_dualpipe.models import ModelConfig, StageOptions, TransformerStage, build_model, split

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=4, num_dense_layers=1, num_heads=4, num_kv_heads=2, head_dim=4,
    dense_size=24, expert_size=12, num_experts=8, experts_per_token=2, init_std=0.3,
)  # fmt: skip
VARIANTS = {
    "gqa": CONFIG,
    "mla": dataclasses.replace(CONFIG, attention="mla", kv_rank=8, rope_dim=4, value_dim=6),
}
END = 30
LENGTHS = 5, 1, 7, 2, 4  # end tokens included; the last document is cut off


def packed(rows=2):
    """Windows [B, S] of documents with these lengths, in a different order in each row."""
    orders = [LENGTHS, LENGTHS[:4][::-1] + LENGTHS[4:], (*LENGTHS[1:4], LENGTHS[0], LENGTHS[4])]
    tokens = torch.randint(END, (rows, sum(LENGTHS)))
    for row, order in zip(tokens, orders, strict=False):
        row[torch.tensor(order).cumsum(0)[:-1] - 1] = END
    return tokens, orders[:rows]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("attention", VARIANTS)
def test_a_document_in_a_window_gives_the_same_result_as_alone(attention, stages):
    config = VARIANTS[attention]
    plain = build_model(config, options=StageOptions(seed=3)).double()
    pipeline = [
        TransformerStage(config, spec, options=StageOptions(seed=3, document_end_id=END)).double()
        for spec in split(config, stages)
    ]
    tokens, orders = packed()
    output = (tokens,)
    with torch.no_grad():
        for stage in pipeline:
            output = stage(*output)
        alone = torch.stack([
            torch.cat([plain(document[None])[0] for document in row.split(order)])
            for row, order in zip(tokens, orders, strict=True)
        ])  # fmt: skip
        torch.testing.assert_close(output, alone, atol=1e-12, rtol=1e-12)
        assert (plain(tokens) - output).abs().max() > 0.1


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("end", [None, END])
def test_only_documents_need_a_mask_and_all_layers_share_it(monkeypatch, attention, end):
    masks, attend = [], F.scaled_dot_product_attention

    def spy(q, k, v, mask=None, **options):
        masks.append((mask, options["is_causal"]))
        return attend(q, k, v, mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    build_model(VARIANTS[attention], options=StageOptions(document_end_id=end))(packed()[0])
    assert len({id(mask) for mask, _ in masks}) == 1
    assert {causal for _, causal in masks} == {end is None} and (masks[0][0] is None) == (end is None)


def test_mtp_refuses_a_document_mask():
    with pytest.raises(ValueError, match="has no document mask: use no document_end_id, or mtp_layers 0"):
        build_model(dataclasses.replace(CONFIG, mtp_layers=1), options=StageOptions(document_end_id=END))
