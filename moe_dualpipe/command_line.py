"""Options from the fields of a dataclass: read from a command line, and shown in its help.

A field is an option; its docstring is the help text, and its type says which words are valid. A field that is a
dataclass is a group of options, with its name before theirs: `cost: Costs` gives --cost.F. Errors are one line.
argparse splits the words; it does not convert them, because its messages name no value.
"""

import inspect
import json
import re
import shutil
import sys
import textwrap
import typing
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import docstring_parser
import msgspec

from .messages import WANTED, quoted, unknown_name

INDENT = 27  # columns in which the name of an option fits beside its text
UNBROKEN = "\N{NO-BREAK SPACE}"
_T = TypeVar("_T")


class OptionError(ValueError):
    """An option that does not exist, or a value that it cannot have."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How a field is read and shown. metavar: what help shows for its value; "" to show its type.

    positional: a word without a name. inline: a group of options without the name of the group.
    """

    metavar: str = ""
    positional: bool = False
    inline: bool = False


Positional = Annotated[_T, Mark(positional=True)]
Inline = Annotated[_T, Mark(inline=True)]


def one_of(*names: str) -> Mark:
    """Help shows these names as it shows those of a Literal. They are not checked."""
    return Mark(f"{{{','.join(names)}}}")


# ---- Options ----


@dataclass(frozen=True, slots=True)
class Option:
    """name: the field's name, with its groups before it: "cost.F". kind: the type of its value. text: the help.

    default: MISSING if required. label: the name in messages. names: the valid words, if `kind` does not list them.
    """

    name: str
    kind: Any
    default: Any
    text: str
    label: str
    mark: Mark = Mark()
    names: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of the value; NoneType is last, if the value may be None."""
        union = typing.get_origin(self.kind) in (typing.Union, UnionType)
        return typing.get_args(self.kind) if union else (self.kind,)

    @property
    def list_kind(self) -> Any:
        """The type of the entries of a value that has several; None if it has one."""
        several = [one for one in self.kinds if typing.get_origin(one) in (tuple, list, Sequence)]
        return typing.get_args(several[0])[0] if several else None

    @property
    def choices(self) -> tuple[str, ...]:
        return self.names or tuple(name for kind in self.kinds for name in literals(kind))

    @property
    def metavar(self) -> str:
        """How help shows the value: "INT", "{a,b}", "FLOAT ..." for several, "" for a flag."""
        if self.mark.metavar:
            return self.mark.metavar
        if self.choices:
            return f"{{{','.join(self.choices)}}}"
        kind = self.list_kind or self.kinds[0]
        return "" if kind is bool else kind.__name__.upper() + " ..." * (self.list_kind is not None)

    def accepts(self, name: str) -> bool:
        """Whether a word is one of the choices."""
        return name in self.choices

    def convert(self, value: Any, strict: bool = False) -> Any:
        """Convert words of a command line, or a value of TOML. strict: the value comes from Python: parse no strings.

        Raises OptionError for a value of another type.
        """
        if NoneType in self.kinds and value in (None, "none", "None"):
            return None
        if self.choices:
            if not self.accepts(str(value)):
                raise OptionError(str(unknown_name(self.label, str(value), self.choices)))
            return str(value)
        words = value
        if self.list_kind is not None and isinstance(value, str) and not strict:
            words = value.split(",")
        if self.list_kind in self.kinds and isinstance(words, list) and len(words) == 1:
            words = words[0]
        strict = strict or (bool in self.kinds and not isinstance(value, str))
        try:
            return msgspec.convert(words, self.kind, strict=strict, dec_hook=lambda kind, word: kind(word))
        except msgspec.ValidationError:
            raise OptionError(f"{self.label} must be {self._wanted}: got {quoted(value, 60)}") from None

    @property
    def _wanted(self) -> str:
        if self.list_kind is None:
            return WANTED.get(self.kinds[0], "text")
        return {int: "a list of whole numbers", float: "a list of numbers"}.get(self.list_kind, "a list of texts")


def literals(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def fields_of(section: Any) -> list[tuple[str, Any, Any, str]]:
    """Name, type with annotations, default and docstring of each field of a dataclass, inherited fields included.

    The default is MISSING if there is none.
    """
    kinds = typing.get_type_hints(section, include_extras=True)
    bases = [base for base in reversed(section.__mro__) if is_dataclass(base)]
    texts = {name: text for base in bases for name, text in _docstrings(base).items()}
    return [(one.name, kinds[one.name], one.default, texts.get(one.name, "")) for one in fields(section)]


@cache  # reading the source takes milliseconds
def _docstrings(section: Any) -> dict[str, str]:
    """The docstrings of a dataclass's own fields. Empty for a class without source file, as in an interpreter."""
    try:
        documented = docstring_parser.parse_from_object(section).params
    except (OSError, TypeError):
        return {}
    return {one.arg_name: " ".join((one.description or "").split()) for one in documented}


def unmarked(kind: Any) -> tuple[Any, Mark]:
    """A type without its annotations, and the mark among them."""
    mark = Mark()
    while typing.get_origin(kind) is Annotated:
        kind, *annotations = typing.get_args(kind)
        for one in annotations:
            if isinstance(one, Mark):
                mark = Mark(one.metavar or mark.metavar, one.positional or mark.positional, one.inline or mark.inline)
    return kind, mark


def options_of(section: Any, prefix: str = "") -> list[Option]:
    """The options of a dataclass in order, with those of its groups."""
    found = []
    for name, annotated, default, text in fields_of(section) if is_dataclass(section) else []:
        kind, mark = unmarked(annotated)
        if is_dataclass(kind):
            found += options_of(kind, prefix if mark.inline else f"{prefix}{name}.")
        else:
            label = mark.metavar if mark.positional else f"--{prefix}{name.replace('_', '-')}"
            found.append(Option(f"{prefix}{name}", kind, default, text, label, mark))
    return found


# ---- From words to a dataclass ----


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        raise OptionError(re.sub(r"^(\S+?)(?:/\S+)?: expected (?:at least )?one argument", r"\1 needs a value", text))


def parser_of(options: Sequence[Option]) -> ArgumentParser:
    """A parser whose results are words, by the names of the options. Its errors are OptionErrors."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    negated = {option.name.removeprefix("no_") for option in options if option.name.startswith("no_")}
    for option in options:
        several = option.list_kind is not None
        if option.mark.positional:
            parser.add_argument(option.name, nargs="*" if several else "?", metavar=option.label)
        elif bool in option.kinds and option.name.removeprefix("no_") in negated:
            parser.add_argument(option.label, dest=option.name, action="store_const", const=True)
        elif bool in option.kinds:
            parser.add_argument(option.label, dest=option.name, action=BooleanOptionalAction)
        elif several:
            parser.add_argument(option.label, dest=option.name, nargs="+", action="extend")
        else:
            parser.add_argument(option.label, dest=option.name)
    return parser


def read_options(kind: type[_T], words: Sequence[str]) -> _T:
    """The dataclass with the options on a command line. Raises OptionError, and ValueError for a value out of range."""
    options = options_of(kind)
    given, unknown = parser_of(options).parse_known_intermixed_args([*words])
    for word in unknown:
        if not re.match(r"--?[a-zA-Z]", word):
            raise OptionError(f"unexpected: {quoted(word, 60)}")
        typed = {option.name: option.label for option in options if not option.mark.positional}
        raise OptionError(f"{unknown_option('option', word, typed)}--help lists all")
    values = {option.name: getattr(given, option.name) for option in options}
    values = {name: value for name, value in values.items() if value is not None}
    missing = [option.label for option in options if option.default is MISSING and option.name not in values]
    if missing:
        raise OptionError(f"missing {' '.join(missing)}")
    return _built(kind, {one.name: one.convert(values[one.name]) for one in options if one.name in values})


def unknown_option(kind: str, word: str, typed: Mapping[str, str]) -> str:
    """The error for an unknown option, with the most similar name.

    typed: what to type, by the name of the option. The caller appends where all options are listed.
    """
    word = word.partition("=")[0]
    name = word.lstrip("-").replace("-", "_")[:100]
    last = name.rpartition(".")[2].removeprefix("no_")
    dashed = {f"--{one}": text for one, text in typed.items()}  # a short word is nearer with its dashes
    exact, same = [name] * (name in typed), [one for one in typed if one.rpartition(".")[2] == last]
    very_close, close = (get_close_matches(f"--{name}", dashed, 1, cutoff) for cutoff in (0.85, 0.6))
    near = [*map(typed.get, exact), *map(dashed.get, very_close), *map(typed.get, same), *map(dashed.get, close)]
    return f"unknown {kind} {quoted(word, 60)}; {f'did you mean {near[0]}? ' if near else ''}"


def _built(kind: type[_T], values: Mapping[str, Any], prefix: str = "") -> _T:
    """The dataclass from the values of its options, by name."""
    arguments = {}
    for name, annotated, *_ in fields_of(kind):
        inner, mark = unmarked(annotated)
        if is_dataclass(inner):
            group: Any = inner
            arguments[name] = _built(group, values, prefix if mark.inline else f"{prefix}{name}.")
        elif f"{prefix}{name}" in values:
            arguments[name] = values[f"{prefix}{name}"]
    try:
        return kind(**arguments)
    except ValueError as error:
        group = prefix.removesuffix(".")
        raise ValueError(re.sub(rf"^{group} (\w+ must )", rf"--{group}.\1", str(error)) if group else error) from error


def program_options(kind: type[_T], program: str) -> _T:
    """The options of a script. `--help` prints them, and an invalid option prints one line and exits with code 2."""
    words = sys.argv[1:]
    if {"-h", "--help"} & {*words}:
        print(command_help(program, kind))
        raise SystemExit(0)
    try:
        return read_options(kind, words)
    except ValueError as error:
        sys.stderr.write(f"{program}: error: {error}\n")
        raise SystemExit(2) from None


# ---- Help ----


def shown(value: Any) -> str:
    """A default as people type it: text with spaces in quotes, a list as words."""
    if isinstance(value, tuple):
        return " ".join(map(shown, value))
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if text.isprintable() and not re.search(r"\s|^$", text) else json.dumps(text)


def entry(name: str, value: str, text: str, default: Any = None, most: int | None = None) -> str:
    """The lines of an option. A default stays on one line. None, False and empty defaults are not shown.

    most: maximum number of characters; later sentences are dropped, but never the first.
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
    """The first sentences, at most `most` characters in all, but always the first one."""
    kept = ""
    for sentence in re.split(r"(?<=\.) (?=\S)", text):
        if kept and len(f"{kept} {sentence}") > most:
            break
        kept = f"{kept} {sentence}".strip()
    return kept


def command_help(program: str, command: type) -> str:
    """The help of a command: what it does, what it takes, and its options."""
    arguments = [entry(one.mark.metavar, "", one.text) for one in options_of(command) if one.mark.positional]
    options = _option_entries(command)
    words = [program, *(one.split("  ")[1] for one in arguments), *["[OPTIONS]"][: len(options)]]
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = [line for one in paragraphs for line in ["", *textwrap.wrap(one, 100, break_on_hyphens=False)]]
    return "\n".join(
        [f"usage: {' '.join(words)}", *text, *[""][: len(arguments)], *arguments, *[""][: len(options)], *options]
    )


def _option_entries(section: Any, prefix: str = "") -> list[str]:
    """Help entries: required options first, then the class's own, then inherited ones, then groups."""
    entries, groups = [], []
    own = inspect.get_annotations(section)
    found = fields_of(section) if is_dataclass(section) else []
    options = {option.name: option for option in options_of(section, prefix)}
    for name, annotated, default, text in sorted(found, key=lambda one: (one[2] is not MISSING, one[0] not in own)):
        kind, mark = unmarked(annotated)
        if is_dataclass(kind):
            lead = prefix if mark.inline else f"{prefix}{name}."
            groups += ["", text or inspect.cleandoc(kind.__doc__ or ""), *_option_entries(kind, lead)]
        elif not mark.positional:
            option = options[f"{prefix}{name}"]
            required = " Required." if default is MISSING else ""
            label = option.label + (f", --no-{name.replace('_', '-')}" if kind is bool and default is True else "")
            entries.append(entry(label, option.metavar, text + required, None if default is MISSING else default))
    return [*entries, *groups]
