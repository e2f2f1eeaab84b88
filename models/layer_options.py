"""Options of your own layer: a dataclass, whose fields can be set on a command line.

    @dataclass
    class LoRAOptions:
        rank: int = 8
        "Number of rows of A and columns of B."

    class LoRAExperts(nn.Module):
        def __init__(self, config, num_local_experts, options: LoRAOptions): ...

    train.py --experts lora.py:LoRAExperts --set model.expert_options.rank=16
    ModelConfig(experts=LoRAExperts, expert_options=LoRAOptions(rank=16))

A configuration stores them as text, "rank=16", so that it can be saved and compared without the class.
"""

import dataclasses
import inspect
import shlex
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from moe_dualpipe.messages import printable

LayerOptions = str | Mapping[str, Any] | Any
"""Options as text, as a mapping, or as an instance of a dataclass."""


def options_text(options: LayerOptions) -> str:
    """The options as words `key=value`. Raises ValueError for other text, and for objects other than dataclasses.

    Example: {"rank": 8, "widths": [64, 128]} -> "rank=8 widths=64,128".
    """
    if isinstance(options, str):
        words = _split(options)
        for word in words:
            if not word.partition("=")[0].isidentifier() or "=" not in word:
                raise ValueError(f"an option of a layer must be key=value: got {printable(word, 60)!r}")
        return shlex.join(words)
    if dataclasses.is_dataclass(options) and not isinstance(options, type):
        options = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    if not isinstance(options, Mapping):
        raise ValueError(f"options of a layer must be a mapping or a dataclass: got {type(options).__name__}")
    return shlex.join(f"{name}={_text(value)}" for name, value in options.items())


@lru_cache(maxsize=256)  # a model has many layers
def parse_options(make: Callable[..., Any], text: str) -> Any:
    """Return `text` as an instance of the dataclass that annotates the parameter `options` of `make`.

    Raises ValueError for options that the dataclass lacks, and for values of another type.
    """
    from moe_dualpipe.command_line import options_of  # imports what only commands need

    kind = _options_class(make)
    options, values = {option.name: option for option in options_of(kind)}, {}
    for word in _split(text):
        name, _, value = word.partition("=")
        if name not in options:
            known = f"choose from: {', '.join(options)}" if options else "it has no options"
            raise ValueError(f"{kind.__name__} has no option {name!r}; {known}")
        values[name] = options[name].convert(value)
    return kind(**values)


def _options_class(make: Callable[..., Any]) -> Any:
    function = make.__init__ if isinstance(make, type) else inspect.unwrap(make)
    try:
        kind = typing.get_type_hints(function).get("options")
    except NameError as error:
        raise ValueError(f"cannot resolve the annotations of {make.__name__}: {error}") from None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"{make.__name__} must annotate its parameter `options` with a dataclass: got {kind}")
    return kind


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot split the options {printable(text, 60)!r} into words: {error}") from None


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
