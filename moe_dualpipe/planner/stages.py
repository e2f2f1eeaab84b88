"""Which layers each stage of a planned pipeline holds."""

from functools import lru_cache

from ..models import StageSpec
from ..models.partition import divide
from .peak import even_stages
from .shape import ModelShape


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
    costs = [1, *(layer.flops(shape.hidden) for layer in shape.layers), shape.head.flops * (1 + shape.mtp)]
    costs[-1] += shape.mtp * (shape.layers[-1].flops(shape.hidden) + shape.mtp_join.flops)
    ends = divide(costs, num_stages)
    layers, specs = len(shape.layers), []
    for start, end in zip((0, *ends), ends, strict=False):
        first, last = max(start - 1, 0), min(end - 1, layers)
        blocks = range(first, last + shape.mtp * (end == len(costs)))
        specs.append(StageSpec(blocks, start == 0, end == len(costs), sum(costs[start:end]) / sum(costs)))
    return tuple(specs)
