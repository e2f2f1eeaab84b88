"""Inference without a pipeline: two micro-batches side by side, each hiding the other's communication.

As in DeepSeek's published inference profiles, the computation is divided evenly over two micro-batches, for prefill
and for decoding alike. Each token is one forward of the whole prefix.
"""

import torch
from torch import Tensor

from .transformer import TransformerStage


@torch.no_grad()
def prefill(stage: TransformerStage, x: Tensor) -> Tensor:
    """The stage's outputs for all sequences, [B, S] or [B, S, D]: as `stage(x)`, computed as two interleaved halves.

    With expert parallelism every rank must have at least two sequences, or every rank one: the order of communication
    must be the same. A single sequence has nobody to hide behind.
    """
    if len(x) < 2:
        return stage(x)
    halves = x.tensor_split(2)
    return torch.cat(stage.interleaved_forward(stage, [halves[0]], stage, [halves[1]]))


def generate(
    model: TransformerStage,
    prompts_BS: Tensor,
    num_tokens: int,
    max_length: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> Tensor:
    """Return the `num_tokens` tokens that follow each prompt: [B, num_tokens].

    `model` is a whole model, in one stage. max_length: the longest prefix it sees. temperature: 0 takes the most likely
    token. Raises ValueError for a stage that does not map tokens to logits, and for empty prompts.
    """
    if not (model.spec.embedding and model.spec.head):
        raise ValueError(f"generate needs a whole model, from embedding to head: got a stage with {model.spec}")
    if prompts_BS.ndim != 2 or not prompts_BS.shape[1]:
        raise ValueError(f"generate needs prompts [B, S] of at least one token: got {[*prompts_BS.shape]}")
    random = torch.Generator().manual_seed(seed)
    tokens_BS = prompts_BS
    for _ in range(num_tokens):
        output = prefill(model, tokens_BS[:, -max_length:])
        next_B = sample(model.logits(output[:, -1]), temperature, random)
        tokens_BS = torch.cat([tokens_BS, next_B[:, None]], dim=1)
    return tokens_BS[:, prompts_BS.shape[1] :]


def sample(logits_BV: Tensor, temperature: float, random: torch.Generator) -> Tensor:
    """One token for each row, [B]: drawn at `temperature`, or the most likely at 0. `random` is on the CPU."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    probabilities_BV = (logits_BV.float().cpu() / temperature).softmax(-1)
    return torch.multinomial(probabilities_BV, 1, generator=random)[:, 0].to(logits_BV.device)
