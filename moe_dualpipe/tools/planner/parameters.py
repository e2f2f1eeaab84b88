"""The parameters of a rank of this project, exactly: its stages are built on the meta device, which allocates nothing.

So custom layers, frozen tensors and the whole tensors that ZeRO-1 gives to a rank are counted as a run has them.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Self

import torch

from ...expert_parallel import Loopback
from ...expert_parallel.parameters import expert_ids, global_tensors
from ...models import ModelConfig, StageSpec, TransformerStage, share_embedding
from ...runtime.groups import end_holders
from ...runtime.layout import check_ep
from ...runtime.zero import elements_per_owner
from ...schedule import Placement


class RankParameters(NamedTuple):
    """Numbers of parameters of a pipeline rank. trained: those that are not frozen.

    owned: how many each of its data-parallel ranks updates under ZeRO-1.
    """

    dense: int
    experts: int
    trained: int
    owned: tuple[int, ...]


class ParameterSizes(NamedTuple):
    """Sizes of dense tensors, of routed experts' tensors, and of the tensors among them that are frozen.

    shared: the dense tensors that the first and the last stage hold (`share_embedding` in models/transformer.py).
    """

    dense: dict[str, int]
    experts: dict[str, int]
    frozen: dict[str, int]
    shared: dict[str, int]

    @classmethod
    def of_rank(cls, stages: Iterable[Self]) -> Self:
        """The tensors of all stages of a rank. A tensor of two stages, such as a shared embedding, counts once."""
        return cls(*({n: size for one in kind for n, size in one.items()} for kind in zip(*stages, strict=True)))

    def trained(self) -> tuple[dict[str, int], dict[str, int]]:
        """The dense tensors, and those of experts, that are not frozen."""
        dense, experts = ({n: s for n, s in d.items() if n not in self.frozen} for d in (self.dense, self.experts))
        return dense, experts


@lru_cache(maxsize=64)
def parameter_sizes(config: ModelConfig, spec: StageSpec, ep: int = 1) -> ParameterSizes:
    """Sizes of a stage's tensors on one of `ep` ranks, by global name.

    ZeRO-1 divides the optimizer state by these tensors (runtime/zero.py). Raises ValueError for custom layers that
    cannot be built on the meta device.
    """
    try:
        with torch.device("meta"):
            stage = TransformerStage(config, spec, Loopback(config.num_experts, ep))
    except Exception as error:
        raise ValueError(f"the model cannot be built without memory: {error}") from error
    dense, experts, frozen, shared = ParameterSizes({}, {}, {}, {})
    ends = share_embedding([stage]) if config.last_stage_embeds else []
    ids = expert_ids(stage)
    for name, parameter in stage.named_parameters():
        sizes = {n: t.numel() for n, t in global_tensors(name, parameter, ids.get(name))}
        (experts if name in ids else dense).update(sizes)
        frozen.update({} if parameter.requires_grad else sizes)
        shared.update(sizes if any(parameter is other for other in ends) else {})
    return ParameterSizes(dense, experts, frozen, shared)


def built_parameters(
    config: ModelConfig, specs: Sequence[StageSpec], placement: Placement, rank: int, dp: int, ep: int,
    frozen: Callable[[str], bool] | None = None,
) -> RankParameters:  # fmt: skip
    """The parameters of a pipeline rank, from tensors that are built. frozen: whether the one of a global name is.

    There are `dp` pipelines; `ep` of them share the experts of a layer. Raises ValueError if `ep` does not divide `dp`
    or the experts, and for custom layers that cannot be built without memory.
    """
    check_ep(ep, config.num_experts, dp)
    sizes = ParameterSizes.of_rank(parameter_sizes(config, specs[stage], ep) for stage in placement.stages[rank])
    chosen = {name: size for name, size in (sizes.dense | sizes.experts).items() if frozen and frozen(name)}
    sizes = sizes._replace(frozen=sizes.frozen | chosen)
    dense, experts = sum(sizes.dense.values()), sum(sizes.experts.values())
    owned = owned_numbers(sizes, placement, rank, dp, ep)
    return RankParameters(dense, experts, dense + experts - sum(sizes.frozen.values()), tuple(owned))


def owned_numbers(sizes: ParameterSizes, placement: Placement, pp_rank: int, dp: int, ep: int) -> list[int]:
    """How many numbers each data-parallel rank of `pp_rank`, which holds `sizes`, updates under ZeRO-1.

    All data-parallel ranks have replicas of dense parameters; of an expert, every ep-th one (runtime/groups.py). What
    the first and the last stage share is divided among the ranks of both.
    """
    holders, ends = placement.holders(placement.stages[pp_rank][0]), end_holders(placement)
    first, owners = holders.index(pp_rank) * dp, len(holders) * dp
    dense, experts = sizes.trained()
    shared = {name: dense.pop(name) for name in sizes.shared if name in dense}
    of_dense, of_experts = elements_per_owner(dense, owners), elements_per_owner(experts, owners // ep)
    numbers = [of_dense[i] + of_experts[i // ep] for i in range(first, first + dp)]
    if shared:
        of_shared = elements_per_owner(shared, len(ends) * dp)[ends.index(pp_rank) * dp :]
        numbers = [number + more for number, more in zip(numbers, of_shared, strict=False)]
    return numbers
