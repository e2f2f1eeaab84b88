"""Programs that train a model in one process, on the batches that a benchmark gives them, step by step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.training import OptimizerConfig, TrainConfig, Trainer
from moe_dualpipe.training.options import Request
from moe_dualpipe.training.resolve import prepare
from moe_dualpipe.training.rules import NOTHING_GIVEN, Given

ALONE = Launch(0, 0, 1, 1)


def new_trainer(config: TrainConfig, launch: Launch = ALONE, given: Given = NOTHING_GIVEN) -> Trainer:
    """The trainer of train.py."""
    return Trainer(prepare(Request(config), launch, given, from_command=False))


class Ours:
    """The trainer of train.py. first: token ids [B, S] in the shape of all batches."""

    def __init__(self, config: TrainConfig, first: Tensor, weights: Any = None, held_out: Any = None):
        self.batch, self.steps = (first, first), 0
        self.trainer = new_trainer(config, given=Given(weights, lambda _: self.batch, held_out))

    def step(self, inputs_BS: Tensor, labels_BS: Tensor, lr: float = 1.0, update: bool = True) -> float:
        """Do one step, and return its loss. lr: multiplies the learning rate. update: False for gradients only."""
        self.batch, self.steps, self.trainer.lr_factor = (inputs_BS, labels_BS), self.steps + 1, lr
        if update:
            return self.trainer.step(self.steps).record["loss"]
        (loss,) = self.trainer.training_losses(self.steps)
        self.trainer.optimizer.drop_gradients()
        return loss.item()


class Transformers:
    """A model of Hugging Face, trained without a framework."""

    def __init__(self, model: nn.Module, compiled: bool, optim: OptimizerConfig):
        self.model, self.optim = model, optim
        self.run = torch.compile(model) if compiled else model
        self.parameters = [*model.parameters()]
        self.adamw = new_adamw(self.parameters, optim)

    def step(self, inputs_BS: Tensor, labels_BS: Tensor, lr: float = 1.0, update: bool = True) -> float:
        """As that of `Ours`."""
        loss = self.loss(inputs_BS, labels_BS)
        loss.backward()
        if update:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.optim.clip or torch.inf)
            for group in self.adamw.param_groups:
                group["lr"] = self.optim.peak * lr
            self.adamw.step()
        self.adamw.zero_grad()
        return loss.item()

    def loss(self, inputs_BS: Tensor, labels_BS: Tensor) -> Tensor:
        return F.cross_entropy(self.run(inputs_BS, use_cache=False).logits.flatten(0, 1), labels_BS.flatten())


def new_adamw(parameters: Iterable[Tensor], optim: OptimizerConfig) -> torch.optim.AdamW:
    """torch's fused AdamW, with weight decay of matrices only."""
    matrices, vectors = [], []
    for parameter in parameters:
        (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=optim.peak, betas=(optim.beta1, optim.beta2), fused=True)
