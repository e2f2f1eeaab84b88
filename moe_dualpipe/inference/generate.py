"""Text from a model in one stage: the prompts in one forward, then one position at a time behind a key/value cache.

Where experts are spread over ranks, a batch is divided evenly over two micro-batches, for prefill and for decoding
alike, and each hides the other's communication, as in DeepSeek's published inference profiles.

A cache cannot slide: what it keeps of a position was computed from all positions before it. So when as many are cached
as the model may see, the newer half of them is prefilled again, and the older half is out of sight from then on. Until
then a cached token is what a forward of the whole text would give.

B sequences, S positions, N tokens to generate, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..models.kv_cache import KVCache
from ..models.moe import MoE
from ..models.transformer import TransformerStage
from .sampling import Sampling

Step = Callable[[Tensor, int], Tensor]
"""From the tokens [B, S] that follow `past` cached positions to the next token of each sequence, [B]."""


@torch.no_grad()
def prefill(stage: TransformerStage, x: Tensor, caches: Sequence[KVCache] = ()) -> Tensor:
    """The stage's outputs for all sequences, [B, S] or [B, S, D]: as `stage(x)`, computed as two interleaved halves.

    caches: one for each half, to go on from and to add to. With expert parallelism every rank must have at least two
    sequences, or every rank one: the order of communication must be the same. A single sequence has nobody to hide
    behind.
    """
    if len(x) < 2:
        return stage(x, None, *caches[:1])
    halves = x.tensor_split(2)
    inputs = [[half, None, *caches[i : i + 1]] for i, half in enumerate(halves)]
    return torch.cat(stage.interleaved_forward(stage, inputs[0], stage, inputs[1]))


@torch.no_grad()
def generate(
    model: TransformerStage,
    prompts: Tensor | Sequence[Tensor],
    num_tokens: int,
    max_length: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
) -> Tensor:
    """Return the `num_tokens` tokens that follow each prompt: [B, N].

    `model` is a whole model, in one stage. prompts: [B, S], or B of [S], whose lengths may differ. max_length: the most
    positions it sees (see above). temperature, top_k, top_p: sampling.py. stop: a token that ends a sequence, which is
    filled up with it. Ranks that share experts must ask for as many tokens, of prompts with the same spread of lengths.

    Raises ValueError for a stage that does not map tokens to logits, for prompts that are empty or hold what is no
    token of the model, and for numbers that mean nothing.
    """
    if not (model.spec.embedding and model.spec.head):
        raise ValueError(f"generate needs a whole model, from embedding to head: got a stage with {model.spec}")
    sampling, random = Sampling(temperature, top_k, top_p), torch.Generator().manual_seed(seed)
    caches = KVCache(), KVCache()
    experts = [len(layer.expert_parallel.local_experts) for layer in model.modules() if isinstance(layer, MoE)]
    alone = all(held == model.config.num_experts for held in experts)

    def step(new_BS: Tensor, past: int) -> Tensor:
        for cache in caches:
            cache.length = past
        output = model(new_BS, cache=caches[0]) if alone else prefill(model, new_BS, caches)
        return sampling.draw(model.logits(output[:, -1]), random)

    return decode(step, prompts, num_tokens, max_length, model.config.vocab_size, stop, alone)


def decode(
    step: Step,
    prompts: Tensor | Sequence[Tensor],
    num_tokens: int,
    max_length: int,
    vocab_size: int,
    stop: int | None = None,
    alone: bool = True,
) -> Tensor:
    """Call `step` for token after token, as `generate` says; returns [B, N].

    Longer prompts are read together with the others' first tokens, so that positions are equal everywhere and nothing
    has to be masked. alone: nobody needs this rank's steps, so that it may be through when all sequences have ended.
    """
    tokens_BS, lengths_B = _laid_out(prompts, num_tokens, max_length, vocab_size)
    end = int(lengths_B.min())
    start, past, ended_B = max(0, end - max_length), 0, torch.zeros_like(lengths_B, dtype=torch.bool)
    while end < tokens_BS.shape[1]:
        if end - start > max_length:
            start, past = end - max(1, max_length // 2), 0
        next_B = step(tokens_BS[:, start + past : end], past)
        past = end - start
        given_B = end < lengths_B
        if stop is not None:
            next_B = next_B.where(~ended_B, stop)
            ended_B |= (next_B == stop) & ~given_B
        tokens_BS[:, end] = tokens_BS[:, end].where(given_B, next_B)
        end += 1
        if stop is not None and alone and bool(ended_B.all()):
            tokens_BS[:, end:] = stop
            break
    return tokens_BS.gather(1, lengths_B[:, None] + torch.arange(num_tokens, device=tokens_BS.device))


def _laid_out(
    prompts: Tensor | Sequence[Tensor], num_tokens: int, max_length: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The prompts with room for the tokens that follow, [B, longest prompt + N], and their lengths, [B]."""
    if num_tokens < 0 or max_length < 1:
        raise ValueError(
            f"num_tokens cannot be negative, and max_length must be at least 1: got {num_tokens}, {max_length}"
        )
    shapes = [[*prompt.shape] for prompt in prompts]
    if not shapes or any(len(shape) != 1 or not shape[0] for shape in shapes):
        raise ValueError(f"generate needs prompts, each [S] with at least one token: got {shapes}")
    lengths = [length for (length,) in shapes]
    tokens_BS = prompts[0].new_zeros(len(shapes), max(lengths) + num_tokens, dtype=torch.int64)
    for row_S, prompt_S in zip(tokens_BS, prompts, strict=True):
        row_S[: len(prompt_S)] = prompt_S
    low, high = int(tokens_BS.min()), int(tokens_BS.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"the model's tokens are 0 to {vocab_size - 1}: got {low if low < 0 else high} in a prompt")
    return tokens_BS, torch.tensor(lengths, device=tokens_BS.device)
