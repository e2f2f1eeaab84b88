"""AdamW on fp32 master weights, with warm-up, cosine and clipping.

Gradients arrive in `parameter.grad`, in fp32 whatever the parameter's dtype (`grad_dtype`). Where the model is bf16,
the optimizer keeps the real weights in fp32 and rounds them into the model after each step; where it is fp32, the
model's own parameters are the master weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW with linear warm-up and a cosine down to a fraction of the peak."""

    lr: float = 3e-3
    """Peak learning rate."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    final_lr: float = 0.1
    """Learning rate at the end, as a fraction of the peak."""
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    clip: float = 1.0
    """Largest gradient norm over all ranks; larger gradients are scaled down. 0: no limit."""


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Linear warm-up to the peak, then a cosine that reaches `final_lr` of it on the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return config.lr * (config.final_lr + (1 - config.final_lr) * cosine)


class Optimizer:
    """Owns master weights and moments of the parameters given, by global name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig):
        self.parameters = dict(parameters)
        self.master = {name: _master(parameter) for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad_dtype = torch.float32
        matrices = [p for name, p in self.master.items() if self.parameters[name].ndim > 1]
        vectors = [p for name, p in self.master.items() if self.parameters[name].ndim <= 1]
        fused = all(p.is_cuda for p in self.master.values())
        self.adamw = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=fused,
        )
        for weight in self.master.values():  # present from the start, so that a checkpoint can be loaded into it
            self.adamw.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor | float) -> None:
        """One update from `grad * grad_scale`; the gradients are dropped."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, f"{name} has no gradient"
            self.master[name].grad = parameter.grad.mul_(grad_scale)
        self.adamw.step()
        for name, parameter in self.parameters.items():
            self.master[name].grad = parameter.grad = None
            if self.master[name] is not parameter:
                parameter.copy_(self.master[name])

    def drop_gradients(self) -> None:
        """Instead of a step: nothing changes."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The state, to be saved or loaded in place: kind -> parameter name -> tensor shaped like the parameter."""
        state = {name: self.adamw.state[weight] for name, weight in self.master.items()}
        return {
            "model": {name: weight.detach() for name, weight in self.master.items()},
            "exp_avg": {name: s["exp_avg"] for name, s in state.items()},
            "exp_avg_sq": {name: s["exp_avg_sq"] for name, s in state.items()},
        }

    @torch.no_grad()
    def loaded(self, step: int) -> None:
        """Call after `tensors()` were loaded in place, with the number of updates behind them."""
        for name, parameter in self.parameters.items():
            self.adamw.state[self.master[name]]["step"].fill_(step)
            if self.master[name] is not parameter:
                parameter.copy_(self.master[name])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())
