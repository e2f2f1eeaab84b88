"""Open a model whose experts are spread over the processes of torchrun, with copies of those with the most tokens."""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from ..checkpoint import find_model, load_spread_model, open_model, start_tokenizer
from ..checkpoint.destinations import hold_newest
from ..checkpoint.expert_loads import LOADS_FILE, read_loads
from ..checkpoint.weights import OwnLayer
from ..data import Tokenizer
from ..expert_parallel import ByChoice, EpBackend, choose_backend
from ..expert_parallel.gather import gather_objects
from ..expert_parallel.placement import ExpertPlacement, Loads, count_nodes, imbalance, place_experts
from ..expert_parallel.rank_facts import find_machine
from ..messages import plural, printable
from ..models import ModelConfig, TransformerStage
from ..models.build_experts import expert_class
from ..models.custom_layers import named_parameters
from ..runtime.groups import EXPERTS, create_group
from ..runtime.shared_errors import build_on_all_ranks
from ..runtime.world import World
from .generation import ALONE, ExpertRanks


def open_spread(
    path: str, own_layers: Mapping[str, OwnLayer], world: World, sequences: int, length: int, copies: int = 0,
    ep_backend: EpBackend = "auto",
) -> tuple[TransformerStage, Tokenizer, ExpertRanks]:  # fmt: skip
    """The model at `path` on all ranks of `world`, with `copies` copies of experts in each layer. Collective.

    With one rank, this is `open_model`, and nothing is printed.

    The outputs of a token's experts are added in the order of its choices, so copies do not change the sums.
    sequences, length: the most sequences of a rank, and tokens of a sequence. Rank 0 says on stderr how tokens are
    sent, and how many micro-batches take turns. Raises ValueError, on all ranks, if this is impossible.
    """
    if world.size == 1:
        return *open_model(path, own_layers, "cpu" if world.device.type == "cpu" else "cuda"), ALONE
    newest = gather_objects(build_on_all_ranks(lambda: hold_newest(path)))[0]
    folder, config = build_on_all_ranks(lambda: find_model(path, own_layers, newest))
    machines = gather_objects(find_machine())
    layers, loads, placement = build_on_all_ranks(
        lambda: _place(folder, config, world.size, copies, count_nodes(machines))
    )
    slots = config.num_experts + copies
    if placement and world.rank == 0:
        ratios = imbalance(placement.gpu_loads(loads))
        sys.stderr.write(
            f"{slots} slots for {config.num_experts} experts on {world.size} processes: with the loads of training, "
            f"the busiest has {sum(ratios) / len(ratios):.2f} times the mean\n"
        )
    dtype = torch.float32 if world.device.type == "cpu" else torch.bfloat16
    group = create_group(nccl=EXPERTS)
    choice = choose_backend(
        ep_backend, slots, group, world.device, max_tokens=sequences * length * config.experts_per_token,
        hidden_size=config.hidden_size, top_k=1, dtype=dtype,
    )  # fmt: skip
    ranks = ExpertRanks(choice.backend.in_background, group)
    if world.rank == 0:
        batches = plural(ranks.micro_batches(sequences), "micro-batch", "es")
        sys.stderr.write(f"{choice}; {batches} at a time\n")
    placed = dict(zip(layers, placement.experts, strict=True)) if placement else {}
    tokenizer = start_tokenizer(folder, config.vocab_size)
    model = load_spread_model(folder, config, ByChoice(choice.backend), placed)
    return model.to(world.device, dtype), tokenizer, ranks


def _place(
    folder: Path, config: ModelConfig, ranks: int, copies: int, nodes: int
) -> tuple[list[int], Loads, ExpertPlacement | None]:  # fmt: skip
    """The layers with experts, their loads and their placement. Raises ValueError if there is none.

    Without copies, experts stay in the order of their ids: the placement is None.
    """
    experts, slots = config.num_experts, config.num_experts + copies
    if slots % ranks:
        fitting = " or ".join(str(c) for c in range(-experts % ranks, 2 * ranks, ranks))
        what = f"{experts} experts and {copies} copies cannot be divided evenly over {ranks} processes"
        raise ValueError(f"{what}: use --copies {fitting}, or another number of processes")
    if not copies:
        return [], [], None
    if copies > experts * (ranks - 1):
        most = f"{experts * (ranks - 1)}, {ranks - 1} of each expert"
        raise ValueError(f"--copies {copies} is too many for {ranks} processes: use at most {most}")
    if {"expert_id", "expert_ids"} & named_parameters(expert_class(config).make):
        raise ValueError(f"the experts {config.experts!r} are built for their ids, so they cannot be copied")
    if not (file := folder / LOADS_FILE).is_file():
        raise ValueError(f"--copies needs the loads of a training run: {printable(folder)} has no {LOADS_FILE}")
    layers, loads, _ = read_loads(file)
    if any(len(row) != experts for row in loads):
        raise ValueError(f"{printable(file)} is for another model: this one has {plural(experts, 'expert')}")
    return layers, loads, place_experts(loads, slots, ranks, nodes, config.expert_groups)
