"""The contents of expert slots (expert_parallel/slots.py), and their transfer to other ranks.

At first, each expert is in the slot of its id. Tensors, gradients and optimizer state belong to slots for the whole
run: when experts move, only contents travel.

Weights and buffers travel between the ranks of an expert group, and each group does the same. Moments and master
weights travel from the rank that updates one slot to the rank that updates the other. With ZeRO, these may be in
different groups, so each layer is one all-to-all among all ranks that hold it.

E slots of a layer, P slots of a rank.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..expert_parallel.parameters import ExpertIds, global_tensors
from ..models.expert_slots import expert_tensors
from ..runtime.groups import Groups, ranks_of
from ..runtime.layout import Layout
from ..runtime.optimizer import Optimizer


@dataclass(frozen=True, slots=True)
class SlotContents:
    """The tensors of one slot. copied: on every rank with this slot. owned: on one of its replicas, by name.

    Other ranks have no owned ones. owners: the rank of that replica in the group of replicas, by name.
    """

    copied: list[Tensor] = field(default_factory=list)
    owned: dict[str, list[Tensor]] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)


def check_alike(stages: Iterable[nn.Module], kind: str) -> None:
    """Raise ValueError unless all tensors of a rank's experts are alike. kind: the name of the expert layer."""
    alike: dict[str, tuple[list[int], torch.dtype, bool]] = {}
    for tensors in expert_tensors(stages).values():
        for name, tensor, held in tensors:
            if held.layout == "shared":
                raise ValueError(f"the experts {kind!r} of a rank share {name}, so they cannot move to other ranks")
            (_, view), *_ = global_tensors(name, tensor, held)
            mine = [*view.shape], tensor.dtype, tensor.requires_grad
            if alike.setdefault(held.name, mine) != mine:
                raise ValueError(f"{held.name} is not alike for all experts, so they cannot move to other ranks")


class SlotTransfer:
    """Moves the contents of slots. Collective over all ranks that hold the same layers, in the same order of layers."""

    def __init__(self, stages: Collection[nn.Module], layout: Layout, groups: Groups, optimizer: Optimizer):
        self.stages, self.optimizer = stages, optimizer
        self.rank, self.place = layout.rank, layout.replica % layout.ep
        self.replicas = ranks_of(groups.expert_replicas) or (layout.rank,)
        self.group, self.members = groups.dense, ranks_of(groups.dense)
        self.device = next((t.device for stage in stages for t in stage.parameters()), torch.device("cpu"))

    @torch.no_grad()
    def move(self, sources: Mapping[int, Sequence[int]]) -> None:
        """Move contents, while there are no gradients. sources: for some layers, the slot [E] that each slot copies."""
        self.optimizer.wait()
        for layer, tensors in sorted(expert_tensors(self.stages).items()):
            if layer in sources:
                self._exchange(self._slots(tensors), sources[layer])

    def _slots(self, tensors: Sequence[tuple[str, Tensor, ExpertIds]]) -> list[SlotContents]:
        optimizer = self.optimizer
        divided = {name: t.owner for one in optimizer.shards if one.divide for name, t in one.tensors.items()}
        slots: dict[int, SlotContents] = defaultdict(SlotContents)
        for name, tensor, held in tensors:
            for id_, (slot_name, weight) in zip(held.ids, global_tensors(name, tensor.detach(), held), strict=True):
                slot, master = slots[id_], optimizer.master.get(slot_name)
                state = [*optimizer.moments.get(slot_name, {}).values()]
                if master is not None and master.dtype != weight.dtype:  # in fp32, it is the weight
                    state.append(master)
                slot.copied.append(weight)
                if slot_name in divided:
                    slot.owned[held.name], slot.owners[held.name] = state, divided[slot_name]
                else:
                    slot.copied.extend(state)
        return [slots[id_] for id_ in sorted(slots)]

    def _exchange(self, slots: Sequence[SlotContents], source_E: Sequence[int]) -> None:
        sent: dict[int, list[Tensor]] = {rank: [] for rank in self.members}
        received: dict[int, list[Tensor]] = {rank: [] for rank in self.members}
        for source, target in self._transfers(slots, source_E):
            (from_, contents), (to, place) = source, target
            if from_ == self.rank:
                sent[to] += contents
            if to == self.rank:
                received[from_] += place
        out = [_bytes(tensors) for tensors in sent.values()]
        sizes = [sum(t.nbytes for t in tensors) for tensors in received.values()]
        message = torch.cat([part.to(self.device) for part in out])
        arrived = message.new_empty(sum(sizes))
        dist.all_to_all_single(arrived, message, sizes, [*map(len, out)], group=self.group)
        for tensors, part in zip(received.values(), arrived.split(sizes), strict=True):
            for tensor, bytes_ in zip(tensors, part.split([t.nbytes for t in tensors]), strict=True):
                tensor.copy_(bytes_.clone().view(tensor.dtype).view(tensor.shape))  # a copy is aligned to its dtype

    def _transfers(
        self, slots: Sequence[SlotContents], source_E: Sequence[int]
    ) -> Iterator[tuple[tuple[int, list[Tensor]], tuple[int, list[Tensor]]]]:
        """Yield (sending rank, tensors) and (receiving rank, tensors). Only the tensors of this rank are valid."""
        for target, source in enumerate(source_E):
            if source == target:
                continue
            (e_from, i_from), (e_to, i_to) = divmod(source, len(slots)), divmod(target, len(slots))
            old, new = slots[i_from], slots[i_to]
            yield (self._peer(self.rank, e_from), old.copied), (self._peer(self.rank, e_to), new.copied)
            for name in old.owned:
                ranks = self.replicas[old.owners[name]], self.replicas[new.owners[name]]
                yield (self._peer(ranks[0], e_from), old.owned[name]), (self._peer(ranks[1], e_to), new.owned[name])

    def _peer(self, rank: int, place: int) -> int:
        """The rank at `place` of the expert group of `rank`, which is at the place of this rank in its own group."""
        return rank + place - self.place


def _bytes(tensors: Sequence[Tensor]) -> Tensor:
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
