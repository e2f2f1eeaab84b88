"""Which layers each stage of a planned pipeline holds."""

from functools import lru_cache

from ...models import StageSpec
from ...models.partition import divide
from ...models.shape import ModelShape
from .peak import even_stages


@lru_cache(maxsize=1024)
def stages_of(shape: ModelShape, num_stages: int) -> tuple[StageSpec, ...]:
    """Equal numbers of layers on all stages if that is possible, as Megatron-LM divides (`even_stages`).

    Otherwise, the stage with the most FLOPs has as few as possible, and the embedding or the head may be a stage of its
    own.
    """
    try:
        return even_stages(shape, num_stages)
    except ValueError:
        pass
    layer_costs = (layer.flops(shape.hidden) for layer in shape.layers)
    costs = [1, *layer_costs, shape.head.flops + shape.mtp * shape.mtp_module_flops]
    ends = divide(costs, num_stages)
    layers, specs = len(shape.layers), []
    for start, end in zip((0, *ends), ends, strict=False):
        first, last = max(start - 1, 0), min(end - 1, layers)
        blocks = range(first, last + shape.mtp * (end == len(costs)))
        specs.append(StageSpec(blocks, start == 0, end == len(costs), sum(costs[start:end]) / sum(costs)))
    return tuple(specs)
