"""The help of options: one entry each, from the fields of a dataclass and their docstrings, wrapped to the terminal."""

import inspect
import json
import re
import shutil
import textwrap
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any

import docstring_parser

INDENT = 27  # columns in which the name of an option fits beside its text
UNBROKEN = "\N{NO-BREAK SPACE}"


def fields_of(section: Any, annotated: bool = False) -> list[tuple[str, Any, Any, str]]:
    """Name, type, default and docstring of each field of a dataclass, also of those that it inherits.

    annotated: keep the annotations of types. The default is MISSING if there is none.
    """
    kinds = typing.get_type_hints(section, include_extras=annotated)
    bases = [base for base in reversed(section.__mro__) if is_dataclass(base)]
    documented = (one for base in bases for one in docstring_parser.parse_from_object(base).params)
    texts = {one.arg_name: " ".join((one.description or "").split()) for one in documented}
    return [(one.name, kinds[one.name], one.default, texts.get(one.name, "")) for one in fields(section)]


def metavar(kind: Any) -> str:
    """How help shows the value of an option: "INT", "{a,b}", "FLOAT ..." for several, "" for a flag."""
    named = [one.metavar for one in getattr(kind, "__metadata__", ()) if getattr(one, "metavar", None)]
    if named:
        return named[0]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return metavar(arguments[0])
    if origin in (typing.Union, UnionType):
        several = any(typing.get_origin(one) in (tuple, Sequence) for one in arguments)
        return metavar(arguments[0]) + " ..." * several
    if origin is typing.Literal:
        return f"{{{','.join(arguments)}}}"
    return f"{metavar(arguments[0])} ..." if origin else "" if kind is bool else kind.__name__.upper()


def shown(value: Any) -> str:
    """A default as people type it: text with spaces in quotes, a list as words."""
    if isinstance(value, tuple):
        return " ".join(map(shown, value))
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if text.isprintable() and not re.search(r"\s|^$", text) else json.dumps(text)


def entry(name: str, value: str, text: str, default: Any = None, most: int | None = None) -> str:
    """The lines of an option. A default is never broken over two; nothing is said about None, False and an empty one.

    most: keep only as many sentences, and at least the first.
    """
    if default is None:
        text = re.sub("None: ([^ ]*)", rf"Default:{UNBROKEN}\1", text)
    if value.startswith("{") and len(f"{name} {value}") >= INDENT:
        choices, value = value.strip("{}").replace(",", ", "), "NAME"
        text = f"{text} One of: {choices}."
    if most:
        text = _sentences(text, most)
    if default not in (None, "", ()) and default is not False:
        text += " " + f"(default {shown(default)})".replace(" ", UNBROKEN)
    columns = min(max(shutil.get_terminal_size((100, 24)).columns, 60), 100) - INDENT - 2
    lead = f"{name} {value}".rstrip()
    lines = textwrap.wrap(text.strip(), columns, break_long_words=False, break_on_hyphens=False) or [""]
    if len(lead) >= INDENT:
        lines.insert(0, "")
    first, *others = (line.replace(UNBROKEN, " ") for line in lines)
    return "\n".join([f"  {lead:<{INDENT}}{first}".rstrip(), *(" " * (INDENT + 2) + line for line in others)])


def _sentences(text: str, most: int) -> str:
    """The first sentences of a text, of at most so many characters together, and at least one."""
    kept = ""
    for sentence in re.split(r"(?<=\.) (?=\S)", text):
        if kept and len(f"{kept} {sentence}") > most:
            break
        kept = f"{kept} {sentence}".strip()
    return kept


def command_help(name: str, command: type) -> str:
    """The help of a command: what it does, what it takes, and its options."""
    arguments, options = _entries(command)
    words = [name, *(one.split("  ")[1] for one in arguments), *["[OPTIONS]"][: len(options)]]
    usage = f"usage: moe-dualpipe {' '.join(words)}"
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = [line for one in paragraphs for line in ["", *textwrap.wrap(one, 100, break_on_hyphens=False)]]
    return "\n".join([usage, *text, *[""][: len(arguments)], *arguments, *[""][: len(options)], *options])


def _entries(section: Any, prefix: str = "") -> tuple[list[str], list[str]]:
    """The entries of the positional arguments, and of the options: required ones, its own, those that it inherits."""
    arguments, options, groups = [], [], []
    own = inspect.get_annotations(section)
    found = fields_of(section, annotated=True) if is_dataclass(section) else []
    for name, kind, default, text in sorted(found, key=lambda one: (one[2] is not MISSING, one[0] not in own)):
        marks = [str(one) for one in getattr(kind, "__metadata__", ())]
        inner = typing.get_args(kind)[0] if marks else kind
        flag = f"--{prefix}{name.replace('_', '-')}"
        if is_dataclass(inner):
            lead = "" if "OmitArgPrefixes" in marks else f"{name}."
            groups += ["", text or inspect.cleandoc(inner.__doc__ or ""), *_entries(inner, lead)[1]]
        elif "Positional" in marks:
            arguments.append(entry(metavar(kind), "", text))
        else:
            required = " Required." if default is MISSING else ""
            if inner is bool and default is True:
                flag += f", --no-{name.replace('_', '-')}"
            options.append(entry(flag, metavar(kind), text + required, None if default is MISSING else default))
    return arguments, [*options, *groups]
