"""Build the expert layer of a rank. Initial weights do not depend on the number of experts that the rank holds.

The numbers that a constructor draws for an expert depend on the experts before it. So each expert gets its own seed:
its weights are drawn by the layer's `reset_expert`, or copied from a layer that is built with this expert alone.
Tensors that all experts share are copied from a layer with expert 0 alone. Only one such layer exists at a time.
"""

import torch
from torch import Tensor, nn

from moe_dualpipe.errors import in_context
from moe_dualpipe.expert_parallel.parameters import entries, expert_ids, global_tensors
from moe_dualpipe.messages import plural

from .config import ModelConfig
from .custom_layers import LayerClass, custom_source, find_layer, mark_custom
from .experts import SwiGLUExperts
from .layers import seeded
from .per_expert import PerExpert

Weights = dict[str, Tensor]
"""Views of parameters and persistent buffers by name, in which * stands for the id of an expert."""


_ONE_EXPERT = ("config",)


def expert_class(config: ModelConfig) -> LayerClass:
    """The class of expert layers, or of single experts, that `config` names. Raises ValueError for an invalid one."""
    return find_layer(
        "expert layer", str(config.experts), {"swiglu": SwiGLUExperts}, [("config", "num_local_experts"), _ONE_EXPERT],
        str(config.expert_options), ["expert_ids", "expert_id", "layer"],
    )  # fmt: skip


class ExpertBuilder:
    """Builds expert layers of block `layer`.

    Raises ValueError for a class whose initial weights would depend on how many experts it holds.
    """

    def __init__(self, config: ModelConfig, layer: int, seed: int):
        self.config, self.layer, self.seed = config, layer, seed
        self.found = expert_class(config)
        number = min(2, config.num_experts)
        first, second = self._construct(range(1)), self._construct(range(number))
        # What has one entry per expert has 1 entry with one expert and 2 with two. Other sizes equal these by chance.
        self.per_expert, self.common = entries(first, 1) & entries(second, number), frozenset[str]()
        (self.shared, _), (of_two, _) = self._weights(first, range(1)), self._weights(second, range(number))
        # What all experts share has the same shape with any number of them.
        self.common = frozenset(n for n, t in self.shared.items() if n in of_two and of_two[n].shape == t.shape)
        self.tied = _tied_experts(second)

    @torch.no_grad()
    def build(self, local: range) -> nn.Module:
        """The layer with the experts `local`, and the attributes that parameters.py reads."""
        if self.tied and len(local) < self.config.num_experts:
            raise ValueError(
                f"the expert layer {self.config.experts!r}: {self.tied} are one parameter, of which each rank would "
                "train its own copy: use --ep 1, or make it a parameter of the layer, outside of the list of experts"
            )
        experts = self._construct(local)
        shared, of_experts = self._weights(experts, local)
        if torch.get_default_device().type == "meta":  # nothing is drawn
            return experts
        reset = getattr(experts, "reset_expert", None)
        if not reset:
            self._check_shapes(shared, local, self.shared, 0)
        for name, tensor in self.shared.items():
            if name in shared and shared[name].shape == tensor.shape:
                shared[name].copy_(tensor)
        if not reset:
            self._copy_experts(of_experts, local)
            return experts
        try:
            for i, expert in enumerate(local):
                with seeded(self.seed, self._seed_name(expert)):
                    reset(i)
        except Exception as error:
            in_context(error, f"layer {self.layer}, experts", custom_source(experts))
            raise
        return experts

    def _copy_experts(self, own: dict[int, Weights], local: range) -> None:
        """Set the weights of each expert to those of a layer with this expert alone."""
        first, last = own[local[0]], own[local[-1]]
        varied = [name for name in first if name in last and not torch.equal(first[name], last[name])]
        for expert in local:
            ids = range(expert, expert + 1)
            _, alone = self._weights(self._construct(ids, expert), ids)
            self._check_shapes(own[expert], local, alone[expert], expert)
            for name, tensor in alone[expert].items():
                own[expert][name].copy_(tensor)
        for name in varied:
            if torch.equal(first[name], last[name]):
                both = " and ".join(name.replace("*", str(expert)) for expert in (local[0], local[-1]))
                raise ValueError(
                    f"the expert layer {self.config.experts!r}: {both} differ if the experts are built together, and "
                    "are equal if each expert is built alone: draw them with torch's global generator, compute them "
                    "from `expert_ids`, or add `reset_expert`"
                )

    def _construct(self, ids: range, expert: int | None = None) -> nn.Module:
        """A layer with the experts `ids`. The seed is that of an `expert`; None: that of the layer."""
        found, config = self.found, self.config
        with seeded(self.seed, self._seed_name(expert)):
            if found.arguments == _ONE_EXPERT:
                each = [found.build(config, expert_id=e, layer=self.layer) for e in ids]
                experts = PerExpert(nn.ModuleList(each))
            else:
                experts = found.build(config, len(ids), expert_ids=ids, layer=self.layer)
        if isinstance(experts, nn.ModuleList):
            if len(experts) != len(ids):
                raise ValueError(
                    f"the expert layer {config.experts!r} must return one module per expert: got "
                    f"{plural(len(experts), 'module')} for {plural(len(ids), 'expert')}"
                )
            experts = PerExpert(experts)
        if isinstance(experts, PerExpert):
            mark_custom(experts, found.make)
        setattr(experts, "local_experts", ids)  # noqa: B010 - nn.Module declares no such attribute
        return experts

    def _seed_name(self, expert: int | None) -> str:
        return f"layers.{self.layer}.experts" + ("" if expert is None else f".{expert}")

    def _weights(self, experts: nn.Module, ids: range) -> tuple[Weights, dict[int, Weights]]:
        """Shared weights, and the weights of each expert by id. Sets the attributes that parameters.py reads."""
        setattr(experts, "per_expert", self.per_expert)  # noqa: B010 - nn.Module declares no such attribute
        setattr(experts, "common", self.common)  # noqa: B010
        held = expert_ids(experts)
        shared: Weights = {}
        of_experts: dict[int, Weights] = {expert: {} for expert in ids}
        for name, tensor in experts.state_dict().items():
            if name in self.common or (name in held and held[name].layout == "shared"):
                shared[name] = tensor
                continue
            if name not in held:  # extra state, which is not a tensor
                continue
            for expert, (_, view) in zip(held[name].ids, global_tensors(name, tensor, held[name]), strict=True):
                of_experts[expert][held[name].name] = view
        return shared, of_experts

    def _check_shapes(self, own: Weights, local: range, alone: Weights, expert: int) -> None:
        shapes = [{name: [*tensor.shape] for name, tensor in weights.items()} for weights in (own, alone)]
        for name in sorted(own.keys() | alone.keys()):
            together, single = (f"shape {of[name]}" if name in of else "no tensor" for of in shapes)
            if together != single:
                raise ValueError(
                    f"the expert layer {self.config.experts!r}: {name.replace('*', str(expert))} has {together} in a "
                    f"layer with experts {local[0]}-{local[-1]}, and {single} in one with expert {expert} alone: stack "
                    "the experts along the first dimension, keep one module per expert in an nn.ModuleList, or add "
                    "`reset_expert`"
                )


def _tied_experts(experts: nn.Module) -> str:
    """The names of two parameters of different experts that are the same tensor; "" if there are none."""
    experts_of, names = {name: held.ids for name, held in expert_ids(experts).items()}, {}
    for name, parameter in experts.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if experts_of.get(first) != experts_of.get(name):
            return f"{first} and {name}"
    return ""
