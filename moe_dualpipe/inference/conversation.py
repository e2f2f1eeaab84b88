"""A conversation in a terminal. The chat template makes a prompt of all messages; the answer is printed as it comes.

Each answer reads the whole conversation again: a template may render earlier messages differently from turn to turn.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ..data import Tokenizer
from ..data.chats import Chat, ChatTemplate
from ..messages import typed_text
from ..models import TransformerStage
from .generation import generate, printable_text
from .sampling import Sampling

EXIT = "/exit"


def converse(
    model: TransformerStage, tokenizer: Tokenizer, template: ChatTemplate, num_tokens: int, max_length: int,
    sampling: Sampling, seed: int, read: Callable[[str], str] = input,
) -> None:  # fmt: skip
    """Read messages and print answers, until EXIT or the end of the input. Ctrl-C ends an answer, which is kept."""
    messages, device = list[dict[str, str]](), next(model.parameters()).device
    stops, ending = template.stops(tokenizer), template.ending()
    while True:
        try:
            text = typed_text(read("> ")).strip()
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
        text = answer(model, tokenizer, ids, num_tokens, max_length, sampling, seed + len(messages), stops, ending)
        messages.append({"role": "assistant", "content": text})


class _Ended(Exception):  # noqa: N818
    """The text of the answer has its ending."""


def answer(
    model: TransformerStage, tokenizer: Tokenizer, prompt_S: Tensor, num_tokens: int, max_length: int,
    sampling: Sampling, seed: int, stops: Sequence[int], ending: str,
) -> str:  # fmt: skip
    """Print the text that follows a prompt as it comes, and return it, up to one of `stops`, `ending` or Ctrl-C.

    ending: text that ends an answer, where the tokenizer has no token for it. "": none.
    """
    tokens, text, shown = list[int](), "", 0

    def show(next_B: Tensor) -> None:
        nonlocal text, shown
        if (token := int(next_B[0])) in stops:
            return
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if ending and ending in text:
            text = text.partition(ending)[0]
            raise _Ended
        begun = max((n for n in range(len(ending)) if text.endswith(ending[:n])), default=0)  # not to be shown yet
        if not text.endswith("\ufffd"):  # part of a character
            print(printable_text(text[shown : len(text) - begun]), end="", flush=True)
            shown = max(shown, len(text) - begun)

    drawing = sampling.temperature, sampling.top_k, sampling.top_p, seed
    with suppress(KeyboardInterrupt, _Ended):
        generate(model, [prompt_S], num_tokens, max_length, *drawing, stops, on_tokens=show)
    print(printable_text(text[shown:]))
    return text
