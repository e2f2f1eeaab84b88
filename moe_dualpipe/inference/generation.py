"""Generation with a model in one stage: prompts in one forward, then one position at a time with a key/value cache.

If experts are spread over ranks, a batch is divided into two micro-batches, for prefill and for decoding. Each hides
the other's communication, as in DeepSeek's published inference profiles.

A cache cannot drop only its first positions: what it stores of a position was computed from all positions before it.
When it holds `max_length` positions, the newer half is read again and the older half is dropped. Until then a token is
the same as with a forward of the whole text.

B sequences, S positions, N tokens to generate, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from ..messages import check_range
from ..models import KVCache, MoE, TransformerStage
from .eval_mode import eval_mode
from .sampling import Sampling

Step = Callable[[Tensor, int], Tensor]
"""(tokens [B, S] that follow the cached positions, number of cached positions) -> the next token of each, [B]."""


@torch.no_grad()
def prefill(stage: TransformerStage, x: Tensor, caches: Sequence[KVCache] = ()) -> Tensor:
    """The outputs of `stage(x)` for all sequences x, [B, S] or [B, S, D], computed as two interleaved halves.

    caches: one for each half, or none. A single sequence is not interleaved. With expert parallelism the order of
    communication must be the same on all ranks: either each has at least two sequences, or each has one.
    """
    if len(x) < 2:
        return stage(x, None, *caches[:1])
    first, second = ([half, None, *caches[i : i + 1]] for i, half in enumerate(x.tensor_split(2)))
    return torch.cat(stage.interleaved_forward(stage, first, stage, second))


@torch.no_grad()
def generate(
    model: TransformerStage, prompts: Tensor | Sequence[Tensor], num_tokens: int, max_length: int,
    temperature: float = 0.8, top_k: int | None = None, top_p: float = 1.0, seed: int = 0, stop: int | None = None,
    part: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Return the `num_tokens` tokens that follow each prompt: [B, N].

    model: a whole model in one stage, which runs in evaluation mode. prompts: [B, S], or B tensors [S] of any length.
    max_length: the most positions that the model attends to. temperature, top_k, top_p: see `Sampling`. stop: a token
    that ends a sequence; the rest of the row is filled with it. part: (i, n) if these are the prompts from i on of a
    batch of n; then the tokens are those of the whole batch. Ranks that share experts must pass the same `num_tokens`,
    and prompts with the same minimum and maximum length.

    Raises ValueError for a stage that is not a whole model, for prompts that are empty or have invalid token ids, and
    for invalid numbers.
    """
    if not (model.spec.embedding and model.spec.head):
        raise ValueError(f"generate needs a whole model, from embedding to head: got a stage with {model.spec}")
    sampling, random = Sampling(temperature, top_k, top_p), torch.Generator().manual_seed(seed)
    caches = KVCache(), KVCache()
    backends = [layer.expert_parallel for layer in model.modules() if isinstance(layer, MoE)]
    all_local = all(len(backend.local_experts) == backend.num_experts for backend in backends)

    def step(new_BS: Tensor, past: int) -> Tensor:
        for cache in caches:
            cache.length = past
        output = model(new_BS, cache=caches[0]) if all_local else prefill(model, new_BS, caches)
        return sampling.draw(model.logits(output[:, -1]), random, part)

    with eval_mode([model]):
        return decode(step, prompts, num_tokens, max_length, model.config.vocab_size, stop, stop_early=all_local)


@contextmanager
def recorded_routes(model: TransformerStage, num_texts: int) -> Iterator[dict[int, Tensor]]:
    """Collect the experts of each position that `generate` reads in this context, by layer: [B, S, K], at its end.

    The positions are those of the texts as long as they fit into `max_length`. The last token of a text is not read.
    """
    parts, routes = dict[int, list[Tensor]](), dict[int, Tensor]()
    with ExitStack() as hooks:
        for layer in (module for module in model.modules() if isinstance(module, MoE)):
            seen = parts.setdefault(layer.layer, [])

            def note(_router: object, _inputs: object, decision: tuple[Tensor, ...], seen: list[Tensor] = seen) -> None:
                seen.append(decision[1].unflatten(0, (num_texts, -1)))

            handle = layer.router.register_forward_hook(note)
            hooks.callback(handle.remove)
        yield routes
    routes |= {layer: torch.cat(seen, 1) for layer, seen in parts.items() if seen}


def decode(
    step: Step, prompts: Tensor | Sequence[Tensor], num_tokens: int, max_length: int, vocab_size: int,
    stop: int | None = None, stop_early: bool = True,
) -> Tensor:  # fmt: skip
    """Call `step` once per token; returns [B, N]. Arguments and errors are those of `generate`.

    All sequences advance together: while a longer prompt supplies its next token, a shorter one already gets a new one.
    So all have the same positions, and no mask is needed. stop_early: return when all sequences have ended; True only
    if no other rank takes part in the steps.
    """
    tokens_BS, lengths_B = _token_buffer(prompts, num_tokens, max_length, vocab_size)
    end = int(lengths_B.min())
    start, past, ended_B = max(0, end - max_length), 0, torch.zeros_like(lengths_B, dtype=torch.bool)
    while end < tokens_BS.shape[1]:
        if end - start > max_length:
            start, past = end - max(1, max_length // 2), 0
        next_B = step(tokens_BS[:, start + past : end], past)
        past = end - start
        in_prompt_B = end < lengths_B
        if stop is not None:
            next_B = next_B.where(~ended_B, stop)
            ended_B |= (next_B == stop) & ~in_prompt_B
        tokens_BS[:, end] = tokens_BS[:, end].where(in_prompt_B, next_B)
        end += 1
        if stop is not None and stop_early and bool(ended_B.all()):
            tokens_BS[:, end:] = stop
            break
    return tokens_BS.gather(1, lengths_B[:, None] + torch.arange(num_tokens, device=tokens_BS.device))


def _token_buffer(
    prompts: Tensor | Sequence[Tensor], num_tokens: int, max_length: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The prompts with space for new tokens, [B, longest prompt + N], and their lengths, [B]."""
    check_range("num_tokens", num_tokens, 0)
    check_range("max_length", max_length, 1)
    shapes = [[*prompt.shape] for prompt in prompts]
    if not shapes or any(len(shape) != 1 or not shape[0] for shape in shapes):
        raise ValueError(f"generate needs prompts, each [S] with at least one token: got {shapes}")
    lengths = [length for (length,) in shapes]
    tokens_BS = prompts[0].new_zeros(len(shapes), max(lengths) + num_tokens, dtype=torch.int64)
    for row_S, prompt_S in zip(tokens_BS, prompts, strict=True):
        row_S[: len(prompt_S)] = prompt_S
    low, high = int(tokens_BS.min()), int(tokens_BS.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token ids must be from 0 to {vocab_size - 1}: got {low if low < 0 else high} in a prompt")
    return tokens_BS, torch.tensor(lengths, device=tokens_BS.device)


def printable_text(text: str) -> str:
    """`text` with spaces for tabs, and U+FFFD for other control characters, which could change a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.expandtabs(4))
