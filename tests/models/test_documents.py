"""With a document mask, a document in a packed window gives the same result as it does alone."""

import dataclasses

import pytest
import torch

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


def test_mtp_refuses_a_document_mask():
    with pytest.raises(ValueError, match="has no document mask: use no document_end_id, or mtp_layers 0"):
        build_model(dataclasses.replace(CONFIG, mtp_layers=1), options=StageOptions(document_end_id=END))
