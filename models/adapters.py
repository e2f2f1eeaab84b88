"""Give the layers of a model low-rank adapters (lora.py), count them, and measure how far they have moved."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from moe_dualpipe.kernels.linear import at_least_fp32
from moe_dualpipe.messages import unknown_name

from .config import LORA_TARGETS, LoRA, ModelConfig
from .lora import Adapter, squared_norm


def chosen_targets(model: ModelConfig, lora: LoRA) -> tuple[str, ...]:
    """The kinds of layers that get adapters. Raises ValueError for one that the model does not have."""
    routed = bool(model.routed_blocks())
    has = {
        "attention": True, "experts": routed and "experts" not in model.own_layers,
        "dense": any(map(model.is_dense, range(model.num_layers))),
        "shared": routed and model.num_shared_experts > 0, "router": routed,
    }  # fmt: skip
    missing = {
        "experts": "custom experts cannot have adapters" if routed else "this model has no routed experts",
        "dense": "this model has no dense layers", "shared": "this model has no shared experts",
        "router": "this model has no routers",
    }  # fmt: skip
    for target in lora.targets:
        if target not in has:
            raise unknown_name("lora.targets", target, LORA_TARGETS)
        if not has[target]:
            raise ValueError(f"lora.targets={target}: {missing[target]}")
    return tuple(
        kind for kind in LORA_TARGETS if (kind in lora.targets if lora.targets else has[kind] and kind != "router")
    )


def describe_adapters(model: ModelConfig, lora: LoRA) -> str:
    """Such as "adapters of rank 2 and scale 2 in attention, experts". Raises ValueError as `chosen_targets`."""
    if not lora.rank:
        return "no adapters"
    return f"adapters of rank {lora.rank} and scale {lora.scale:g} in {', '.join(chosen_targets(model, lora))}"


def add_adapters(model: ModelConfig, blocks: Mapping[str, nn.Module], lora: LoRA, seed: int) -> None:
    """Add adapters to blocks, given by number. Raises ValueError for a target that a block cannot have."""
    targets = chosen_targets(model, lora)
    for number, block in blocks.items():
        for kind, name, part in _parts(block):
            if kind in targets:
                _adapt(part, kind, f"layers.{number}.{name}", lora, seed)


def _parts(block: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """The parts of a block that may have adapters: kind, name, and module."""
    mlp = getattr(block, "mlp", None)
    routed = hasattr(mlp, "experts")
    found = {"attention": ("attention", getattr(block, "attention", None)), "dense": ("mlp", None if routed else mlp)}
    if routed:
        found |= {kind: (f"mlp.{kind}", getattr(mlp, kind)) for kind in ("experts", "shared", "router")}
    yield from ((kind, name, part) for kind, (name, part) in found.items() if part is not None)


def _adapt(part: nn.Module, kind: str, where: str, lora: LoRA, seed: int) -> None:
    layers = {name: layer for name, layer in part.named_modules() if hasattr(layer, "add_adapter")}
    if not layers:
        raise ValueError(
            f"lora.targets={kind}: {type(part).__name__} has no layer that can have adapters: make its matrices "
            "moe_dualpipe.models.layers.Linear, or choose other targets"
        )
    rows: dict[str, tuple[int, ...]] = {}
    for name, module in part.named_modules():
        stacked = getattr(module, "published_rows", None) or getattr(module, "stacked", {})
        rows |= {f"{name}.{weight}".lstrip("."): tuple(sizes) for weight, sizes in stacked.items()}
    for name, layer in layers.items():
        at = f"{where}.{name}".rstrip(".")
        layer.add_adapter(lora, kind, rows.get(f"{name}.weight".lstrip(".")), seed, f"{at}.lora")  # type: ignore


def adapters_of(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Adapter]]:
    """The layers with an adapter, and their adapters."""
    for module in modules:
        for layer in module.modules():
            if isinstance(adapter := getattr(layer, "lora", None), Adapter):
                yield layer, adapter


def relative_updates(norms: torch.Tensor) -> dict[str, float]:
    """From the sum of `squared_norms` over ranks: the relative size of the updates of each kind of adapter."""
    sizes = zip(LORA_TARGETS, norms.sqrt().tolist(), strict=True)
    return {kind: update / weight for kind, (update, weight) in sizes if weight}


@torch.no_grad()
def squared_norms(stages: Iterable[nn.Module]) -> torch.Tensor:
    """The squared norms of the updates and of the adapted weights, summed by kind: [LORA_TARGETS, 2] in fp64."""
    norms = torch.zeros(len(LORA_TARGETS), 2, dtype=torch.float64)
    for layer, adapter in adapters_of(stages):
        row = norms[LORA_TARGETS.index(adapter.kind)]
        for name, pairs in adapter.pairs().items():
            row[0] += squared_norm(pairs, adapter.scale).cpu()
            row[1] += torch.linalg.vector_norm(at_least_fp32(layer.get_parameter(name))).double().cpu() ** 2
    return norms
