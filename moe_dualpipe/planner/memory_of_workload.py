"""TEMPORARY: replaced by peak_memory.py."""

from dataclasses import dataclass

from .workload import Workload


@dataclass(frozen=True)
class Memory:
    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "activations": self.activations,
        }


def memory_of(load: Workload) -> Memory:
    from .step import rank_parameters

    dense, experts = rank_parameters(load)
    one, shape = load.division, load.shape
    owned = dense / (one.dp * one.cp) + experts / one.expert_replicas if load.zero else dense + experts
    layer = shape.layers[-1]
    per = {"none": 34, "norms": 28, "attention": 18, "full": 2}[load.recompute] * shape.hidden
    if load.recompute != "full":
        per += 6 * layer.top_k * layer.expert_size + 2 * layer.top_k * shape.hidden
    tokens = load.rank_tokens
    held = min(load.num_micro_batches, one.pp + 1)
    acts = held * tokens * per * len(shape.layers) / one.pp + 10 * tokens * shape.vocab
    return Memory(2 * (dense + experts), 4 * (dense + experts), 12 * owned, acts)
