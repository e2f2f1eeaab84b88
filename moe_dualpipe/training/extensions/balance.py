"""Expert load balancing in each step: biases of routers, auxiliary losses, and the loads in the metrics."""

from torch import Tensor

from . import Extension, Trained, Update


class Balancing(Extension):
    def __init__(self, trainer: Trained):
        self.balance, self.device = trainer.balance, trainer.device

    def after_update(self, update: Update) -> None:
        update.record |= load_statistics(update.loads_LE)
        update.record |= self.balance.after_step(update.loads_LE, self.device, move=update.finite)


def load_statistics(load_LE: Tensor) -> dict[str, float]:
    """The maximum load of an expert over the mean, in the worst layer, and the fraction of experts without a token.

    load_LE: tokens per layer and expert. Example: [[4, 0, 2, 2]] has a mean of 2, so these are 2.0 and 0.25.
    """
    if not load_LE.sum():
        return {}
    mean_L = load_LE.float().mean(1).clamp(min=1e-9)
    return {
        "expert_load_max_over_mean": round((load_LE.max(1).values / mean_L).max().item(), 3),
        "dead_experts": round((load_LE == 0).float().mean().item(), 4),
    }
