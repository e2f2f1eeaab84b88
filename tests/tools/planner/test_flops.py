"""FLOPs against torch's FlopCounterMode, and peak FLOP/s of devices."""

import pytest
import torch
from moe_dualpipe.tools.planner.flops import peak_flops
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe_dualpipe.models import ModelConfig, build_model, next_token_loss, preset
from moe_dualpipe.models.costs import train_flops_per_token
from moe_dualpipe.tools.planner import shape_of

BATCH, LENGTH = 2, 7
SIZES = {
    "vocab_size": 11, "hidden_size": 12, "num_layers": 3, "num_heads": 4, "dense_size": 20, "expert_size": 5,
    "num_experts": 6, "experts_per_token": 2, "num_shared_experts": 2, "head_dim": 6,
}  # fmt: skip


@pytest.mark.parametrize("choices,widths", [
    ({"num_kv_heads": 2}, 12),
    ({"attention": "mla", "kv_rank": 7, "rope_dim": 2, "value_dim": 5}, 13),
    ({"attention": "mla", "kv_rank": 7, "rope_dim": 2, "value_dim": 5, "q_rank": 3}, 13),
    ({"num_kv_heads": 2, "shared_gate": True, "qkv_bias": True, "rotary_fraction": 0.67, "tied_embeddings": True,
      "num_dense_layers": 0, "dense_layers": (1,), "yarn_factor": 2.0}, 12),
], ids=["gqa", "mla", "mla with q_rank", "options"])  # fmt: skip
def test_flops_equal_those_of_torch_without_masked_scores(choices, widths):
    """The math backend computes all S scores of a position; (S + 1) / 2 of them count."""
    config = ModelConfig(**SIZES, **choices)
    model = build_model(config).double()
    tokens = torch.randint(11, (BATCH, LENGTH))
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = next_token_loss(model(tokens), tokens)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    masked = config.num_layers * config.num_heads * widths * (LENGTH - 1)
    expected = BATCH * LENGTH * (shape_of(config).forward_flops(LENGTH) + masked)
    assert forward.get_total_flops() == expected
    assert backward.get_total_flops() == 2 * expected
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


def test_the_docstring_example():
    assert shape_of(preset("tiny")).forward_flops(256) == 2 * 822_272 + 4 * 257 * 256


@pytest.mark.parametrize("name,tflops", [
    ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200 NVL", 835.5), ("NVIDIA H200", 989.4),
    ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GH200 480GB", 989.4), ("NVIDIA GB200", 2500), ("NVIDIA L40S", 362),
    ("AMD Instinct MI300X", 1307.4), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA L4", 121), ("NVIDIA H800", 989.4),
    # slices, smaller devices of the same name, unknown devices
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA L40", None),
    ("NVIDIA GeForce RTX 4090 D", None), ("cpu", None), ("", None), ("AMD EPYC 9654", None),
])  # fmt: skip
def test_peak_flops_of_devices(name, tflops):
    expected = None if tflops is None else pytest.approx(tflops * 1e12)
    assert peak_flops(name, torch.bfloat16) == expected
    assert peak_flops(name, torch.float16) == expected
    assert peak_flops(name, torch.float32) is None
