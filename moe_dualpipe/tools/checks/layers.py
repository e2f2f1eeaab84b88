"""Check your own layer against its contract: `check_experts`, `check_router`, `check_attention`, `check_block`.

A check builds small layers on one device and takes a few seconds. It accepts the same classes as `ModelConfig`.

    report = check_experts(MyExperts, options="rank=8")
    print(report)
    assert report.passed

The first argument is the class or function of the layer, or its name, such as "my_file.py:MyExperts". The others:

options         the layer's own options, as text, a mapping or a dataclass
config          the sizes of the layer
device          where the layer runs
raise_errors    raise exceptions of the layer, instead of reporting each as a failed check

They raise ValueError if the class does not exist, or if its arguments or options do not fit.
"""

from collections.abc import Callable
from dataclasses import replace

from ...errors import CodeLine
from ...models.attention import attention_class
from ...models.block import block_class
from ...models.build_experts import expert_class
from ...models.config import ModelConfig
from ...models.custom_layers import Factory, LayerClass, LayerOptions
from ...models.router import router_class
from .laws import Report, check_laws
from .layer_laws import LAWS
from .subject import Attention, Block, Experts, Router, Subject

SMALL = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=2, num_dense_layers=0, num_heads=4, num_kv_heads=2, head_dim=6,
    kv_rank=10, rope_dim=4, value_dim=5, dense_size=20, expert_size=12, num_experts=4, experts_per_token=2,
    num_shared_experts=0, init_std=0.3,
)  # fmt: skip
"""The default sizes of checks. They differ from each other, so that a layer that confuses two of them fails."""


def check_experts(
    experts: str | Factory, options: LayerOptions = "", config: ModelConfig = SMALL, device: str = "cpu",
    raise_errors: bool = False,
) -> Report:  # fmt: skip
    """Check an expert layer (`ExpertLayer`)."""
    return _check(expert_class, Experts, replace(config, experts=experts, expert_options=options), device, raise_errors)


def check_router(
    router: str | Factory, options: LayerOptions = "", config: ModelConfig = SMALL, device: str = "cpu",
    raise_errors: bool = False,
) -> Report:  # fmt: skip
    """Check a router (`RouterLayer`)."""
    return _check(router_class, Router, replace(config, router=router, router_options=options), device, raise_errors)


def check_attention(
    attention: str | Factory, options: LayerOptions = "", config: ModelConfig = SMALL, device: str = "cpu",
    raise_errors: bool = False,
) -> Report:  # fmt: skip
    """Check attention (`AttentionLayer`)."""
    config = replace(config, attention=attention, attention_options=options)
    return _check(attention_class, Attention, config, device, raise_errors)


def check_block(
    block: str | Factory, options: LayerOptions = "", config: ModelConfig = SMALL, device: str = "cpu",
    raise_errors: bool = False,
) -> Report:  # fmt: skip
    """Check a transformer block (`BlockLayer`), with the experts, router and attention that `config` names."""
    return _check(block_class, Block, replace(config, block=block, block_options=options), device, raise_errors)


def _check(
    find: Callable[[ModelConfig], LayerClass], kind: type[Subject], config: ModelConfig, device: str, raise_errors: bool
) -> Report:
    found, subject = find(config), kind(config, device)
    where = str(CodeLine.of(found.make) or "")
    return check_laws(f"check of the {found.kind} {found.name}", where, subject, LAWS, raise_errors)
