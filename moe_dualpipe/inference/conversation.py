"""A conversation in a terminal. The chat template makes a prompt of all messages; the answer is printed as it comes.

Each answer reads the whole conversation again: a template may render earlier messages differently from turn to turn.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ..data import Tokenizer
from ..data.chats import Chat, ChatTemplate
from ..models import TransformerStage
from .generation import generate, printable_text
from .sampling import Sampling

EXIT = "/exit"


def converse(
    model: TransformerStage, tokenizer: Tokenizer, template: ChatTemplate, num_tokens: int, max_length: int,
    sampling: Sampling, seed: int, read: Callable[[str], str] = input,
) -> None:  # fmt: skip
    """Read messages and print answers, until EXIT or the end of the input. Ctrl-C ends an answer, which is kept."""
    messages, stops, device = list[dict[str, str]](), template.stops(tokenizer), next(model.parameters()).device
    while True:
        try:
            text = read("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if text == EXIT:
            return
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        prompt = template.text(Chat("the conversation", messages), prompt=True)
        ids = torch.from_numpy(tokenizer.encode_batch([prompt], special_tokens=True)[0].astype("int64")).to(device)
        tokens = answer(model, tokenizer, ids, num_tokens, max_length, sampling, seed + len(messages), stops)
        print()
        messages.append({"role": "assistant", "content": tokenizer.decode(tokens)})


def answer(
    model: TransformerStage, tokenizer: Tokenizer, prompt_S: Tensor, num_tokens: int, max_length: int,
    sampling: Sampling, seed: int, stops: Sequence[int],
) -> list[int]:  # fmt: skip
    """Print the text that follows a prompt as it comes, and return its tokens. Ctrl-C ends it."""
    tokens, shown = list[int](), ""

    def show(next_B: Tensor) -> None:
        nonlocal shown
        if (token := int(next_B[0])) in stops:
            return
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith("\ufffd"):  # part of a character
            print(printable_text(text[len(shown) :]), end="", flush=True)
            shown = text

    drawing = sampling.temperature, sampling.top_k, sampling.top_p, seed
    with suppress(KeyboardInterrupt):
        generate(model, [prompt_S], num_tokens, max_length, *drawing, stops, on_tokens=show)
    return tokens
