"""Named model sizes."""

from moe_dualpipe.messages import unknown_name

from .config import ModelConfig

PRESETS: dict[str, ModelConfig] = {
    # These two are of an architecture that Hugging Face's format has, GLM-4-MoE: so they can be exported.
    # Learns Python source code as bytes on two CPU cores within two minutes.
    "tiny": ModelConfig(router_score="sigmoid", router_bias=True, qk_norm="head"),
    # For one GPU. 468 M parameters, 104 M active.
    "small": ModelConfig(
        hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=4, head_dim=64,
        dense_size=3072, expert_size=512, num_experts=32, experts_per_token=4, num_shared_experts=2,
        router_score="sigmoid", router_bias=True,
    ),
    # Published models, from their config.json, without options of training: the factor of the balancing loss
    # (router_aux_loss_coef: OLMoE 0.01, Qwen3 0.001, Mixtral 0.02) and OLMoE's z-loss.
    # 6.92 B parameters, 1.28 B active (arXiv 2409.02060). Its initial weights are truncated at 3 x init_std.
    "olmoe-1b-7b": ModelConfig(
        vocab_size=50304, hidden_size=2048, num_layers=16, num_dense_layers=0, num_heads=16, num_kv_heads=16,
        head_dim=128, qk_norm="full", expert_size=1024, num_experts=64, experts_per_token=8, num_shared_experts=0,
        normalize_weights=False, norm_eps=1e-5,
    ),
    # 30.5 B parameters, 3.3 B active (arXiv 2505.09388).
    "qwen3-30b-a3b": ModelConfig(
        vocab_size=151936, hidden_size=2048, num_layers=48, num_dense_layers=0, num_heads=32, num_kv_heads=4,
        head_dim=128, qk_norm="head", expert_size=768, num_experts=128, experts_per_token=8, num_shared_experts=0,
        rope_theta=1e6,
    ),
    # 46.7 B parameters, 12.9 B active (arXiv 2401.04088).
    "mixtral-8x7b": ModelConfig(
        vocab_size=32000, hidden_size=4096, num_layers=32, num_dense_layers=0, num_heads=32, num_kv_heads=8,
        head_dim=128, expert_size=14336, num_experts=8, experts_per_token=2, num_shared_experts=0,
        rope_theta=1e6, norm_eps=1e-5,
    ),
    # DeepSeek's published models, from their config.json; options that balance experts are from their papers. Not
    # included: V3's multi-token prediction (mtp_layers=1, 11.6 B more parameters), and YaRN, which extends positions
    # beyond the 4,096 tokens of pre-training.
    # 15.7 B parameters, 2.4 B active (arXiv 2405.04434).
    "deepseek-v2-lite": ModelConfig(
        vocab_size=102400, hidden_size=2048, num_layers=27, num_dense_layers=1, attention="mla", num_heads=16,
        head_dim=128, kv_rank=512, rope_dim=64, value_dim=128, dense_size=10944, expert_size=1408, num_experts=64,
        experts_per_token=6, num_shared_experts=2, router_dtype="float32", normalize_weights=False, sequence_loss=1e-3,
    ),
    # 671 B parameters, 37 B active (arXiv 2412.19437).
    "deepseek-v3": ModelConfig(
        vocab_size=129280, hidden_size=7168, num_layers=61, num_dense_layers=3, attention="mla", num_heads=128,
        head_dim=128, q_rank=1536, kv_rank=512, rope_dim=64, value_dim=128, dense_size=18432, expert_size=2048,
        num_experts=256, experts_per_token=8, num_shared_experts=1, router_score="sigmoid", router_dtype="float32",
        expert_groups=8, top_groups=4, routed_scale=2.5, router_bias=True, sequence_loss=1e-4,
    ),
}  # fmt: skip


def preset(name: str) -> ModelConfig:
    """The configuration called `name`. Raises ValueError with the nearest name if it is unknown."""
    if name not in PRESETS:
        raise unknown_name("preset", name, [*PRESETS])
    return PRESETS[name]
