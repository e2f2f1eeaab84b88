"""Find the classes of a model's layers, and pass them options.

A configuration names its layers with strings, so that it can be saved, compared, and sent to other processes:

    "swiglu"                   built in
    "my_package.layers:GELU"   a class or function in a module; the current folder is searched last
    "my_layers.py:GELU"        a class or function in a file; a relative path starts from the current folder

If Python code passes the class or function itself, it gets such a name, under which this process finds it.

A constructor receives the arguments of its contract by position, such as `config`. Others, such as `layer`, are passed
by name, and only to a constructor with a parameter of that name. `**kwargs` does not receive them: constructors often
pass these on to a parent class that does not expect them.

A layer may have options, the fields of a dataclass:

    @dataclass
    class WideOptions:
        width: int = 8

    class WideExperts(nn.Module):
        def __init__(self, config, num_local_experts, options: WideOptions): ...

    train.py --experts wide.py:WideExperts --set model.expert_options.width=16
    ModelConfig(experts=WideExperts, expert_options=WideOptions(width=16))

A configuration stores options as text, "width=16", so that they can be saved and compared without the class.
"""

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from moe_dualpipe.errors import CodeLine, describe_user_error, user_error
from moe_dualpipe.messages import describe, printable

Factory = Callable[..., Any]
"""A class of layers, or a function that returns a layer."""

_OBJECTS: dict[str, Factory] = {}


@dataclass(frozen=True, slots=True)
class LayerClass:
    """A class or function that builds layers, and its options. kind: its name in messages, such as "router".

    arguments: its positional arguments, such as ("config",).
    """

    kind: str
    name: str
    make: Factory
    arguments: tuple[str, ...]
    options: str

    def build(self, *arguments: Any, **optional: Any) -> Any:
        """Build a layer. The constructor receives the `optional` arguments for which it has parameters.

        Raises ValueError if a custom constructor raises, exits, or returns something other than an nn.Module.
        """
        from torch import nn

        given = {name: value for name, value in optional.items() if name in named_parameters(self.make)}
        if "options" in named_parameters(self.make):
            given["options"] = parse_options(self.make, self.options)
        if ":" not in self.name:  # built in
            return self.make(*arguments, **given)
        try:
            layer = self.make(*arguments, **given)
        except (Exception, SystemExit) as error:
            raise ValueError(f"cannot build the {self.kind} {self.name!r}: {describe_user_error(error)}") from error
        if not isinstance(layer, nn.Module):
            what = f"the {self.kind} {self.name!r} must be an nn.Module: got {type(layer).__name__}"
            raise ValueError(at_definition(self.make, what))
        mark_custom(layer, self.make)
        return layer


def name_of(layer: str | Factory) -> str:
    """Return a name under which `find_layer` finds a class or function in this process. Strings are returned unchanged.

    Raises ValueError for an object without a name, such as an instance.
    """
    if isinstance(layer, str):
        return layer
    qualified = getattr(layer, "__qualname__", None)
    if not callable(layer) or qualified is None:
        raise ValueError(f"a layer must be a class, a function, or the name of one: got {printable(layer, 60)}")
    module = sys.modules.get(layer.__module__)
    file = getattr(module, "__file__", None)
    is_program = layer.__module__ == "__main__" or layer.__module__.startswith(_FILE_MODULE)
    name = f"{file if file and is_program else layer.__module__}:{qualified}"
    _OBJECTS[name] = layer
    return name


def same_layer(saved: str, now: str) -> bool:
    """Whether two names may mean the same layer. Only the last parts are compared: files and modules may have moved."""
    moved = all(saved.rpartition(":")) and all(now.rpartition(":"))
    return saved == now or (moved and saved.rpartition(":")[2] == now.rpartition(":")[2])


def find_layer(
    kind: str, name: str, built_in: Mapping[str, Factory], forms: Sequence[tuple[str, ...]], options: str = "",
    optional: Sequence[str] = (),
) -> LayerClass:  # fmt: skip
    """Find the class or function called `name`.

    forms: lists of positional arguments; the first one that the constructor accepts is used. optional: arguments that
    only constructors with a parameter of this name receive. Raises ValueError if the class does not exist, accepts none
    of the forms, or lacks one of these `options`.
    """
    found = built_in.get(name) or _OBJECTS.get(name) or _imported(kind, name)
    if not callable(found):
        raise ValueError(f"the {kind} {name!r} must be a class or a function: got {type(found).__name__}")
    named = named_parameters(found)
    keywords = {*optional, "options"} & named
    error: TypeError | None = None
    for form in forms:
        try:
            _check_call(found, form, keywords, exact=form != forms[-1])
        except TypeError as reason:
            error = error or reason
            continue
        if options and "options" not in named:
            raise ValueError(
                f"the {kind} {name!r} takes no options: got {options!r}; give its constructor a parameter `options`, "
                "annotated with a dataclass"
            )
        if "options" in named:
            parse_options(found, options)  # raises ValueError
        return LayerClass(kind, name, found, form, options)
    expected = " or ".join(f"{name.rpartition(':')[2]}({', '.join(form)})" for form in forms)
    raise ValueError(at_definition(found, f"the {kind} {name!r} must accept {expected}: {error}"))


def _check_call(found: Factory, form: tuple[str, ...], keywords: set[str], exact: bool) -> None:
    """Raise TypeError unless `found` accepts this form. exact: none of these parameters may have a default value."""
    if isinstance(found, type):
        from torch import nn

        if not issubclass(found, nn.Module):
            raise TypeError("it is not an nn.Module")
        if found.__init__ is nn.Module.__init__:
            raise TypeError("it has no constructor")
    signature = inspect.signature(found)
    bound = signature.bind(*form, **dict.fromkeys(keywords))
    for name in [*bound.arguments][: len(form)]:
        if exact and signature.parameters[name].default is not inspect.Parameter.empty:
            raise TypeError(f"its parameter {name!r} has a default value, so it does not receive {form[-1]}")


def named_parameters(make: Factory) -> set[str]:
    """The names of the parameters that can be given by keyword."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # a function written in C
        return set()
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return {parameter.name for parameter in parameters if parameter.kind in kinds}


_FILE_MODULE = "moe_dualpipe_layer_"  # prefix of the names of modules imported from files


def _imported(kind: str, name: str) -> Any:
    place, _, attribute = name.rpartition(":")
    try:
        imported = _import_file(place) if place.endswith(".py") else _import_module(place)
    except ImportError as error:
        raise ValueError(f"cannot import the {kind} {name!r}: {user_error(error) or describe(error)}") from error
    except (Exception, SystemExit) as error:  # the file can do anything, such as call a main function
        raise ValueError(f"cannot import the {kind} {name!r}: {describe_user_error(error)}") from error
    found: Any = imported
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if found is None:
        classes = [each for each, value in vars(imported).items() if isinstance(value, type)]
        near = difflib.get_close_matches(attribute, classes, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"cannot find the {kind} {name!r}: {place} has no {attribute}{meant}")
    return found


def _import_module(name: str) -> ModuleType:
    if not {"", str(Path.cwd())} & {*sys.path}:
        sys.path.append(str(Path.cwd()))  # sys.path of an installed program starts with another folder
    return importlib.import_module(name)


def _import_file(path: str) -> ModuleType:
    """Import a file once, under a unique name. Its folder is searched last for what it imports."""
    file = Path(path).resolve()
    if not file.is_file():
        raise ImportError(f"{printable(path)} is not a file; the current folder is {printable(Path.cwd())}")
    name = f"{_FILE_MODULE}{file.stem}_{sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def mark_custom(layer: Any, source: Any) -> None:
    """Mark a module as a custom layer that `source`, a class or function, has built."""
    setattr(layer, _SOURCE, getattr(source, _SOURCE, source))


def custom_source(layer: Any) -> Any:
    """The class or function that has built a custom layer; None for a built-in layer."""
    return getattr(layer, _SOURCE, None)


_SOURCE = "custom_source"


def at_definition(found: Factory, message: str) -> str:
    """`message`, prefixed with the file and line that define the function, or the constructor of the class."""
    line = CodeLine.of(found.__init__ if isinstance(found, type) and "__init__" in vars(found) else found)
    return f"{line}: {message}" if line is not None else message


# ---- options ----


LayerOptions = str | Mapping[str, Any] | Any
"""Options as text, as a mapping, or as an instance of a dataclass."""


def options_text(options: LayerOptions) -> str:
    """The options as words `key=value`. Raises ValueError for other text, and for objects other than dataclasses.

    Example: {"rank": 8, "widths": [64, 128]} -> "rank=8 widths=64,128".
    """
    if isinstance(options, str):
        words = _words(options)
        for word in words:
            if not word.partition("=")[0].isidentifier() or "=" not in word:
                raise ValueError(f"an option of a layer must be key=value: got {printable(word, 60)!r}")
        return shlex.join(words)
    if dataclasses.is_dataclass(options) and not isinstance(options, type):
        options = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    if not isinstance(options, Mapping):
        raise ValueError(f"options of a layer must be a mapping or a dataclass: got {type(options).__name__}")
    lists = {name: ",".join(map(str, value)) for name, value in options.items() if isinstance(value, tuple | list)}
    return shlex.join(f"{name}={value}" for name, value in {**options, **lists}.items())


@lru_cache(maxsize=256)  # a model has many layers
def parse_options(make: Factory, text: str) -> Any:
    """Return `text` as an instance of the dataclass that annotates the parameter `options` of `make`.

    Raises ValueError for options that the dataclass lacks, missing ones, and values of another type.
    """
    from moe_dualpipe.command_line import options_of  # imports what only commands need

    kind = _options_class(make)
    options = {one.name: dataclasses.replace(one, label=f"{kind.__name__}.{one.name}") for one in options_of(kind)}
    values: dict[str, Any] = {}
    for word in _words(text):
        name, _, value = word.partition("=")
        if name not in options:
            known = f"choose from: {', '.join(options)}" if options else "it has no options"
            raise ValueError(f"{kind.__name__} has no option {name!r}; {known}")
        values[name] = options[name].convert(value)
    for field in dataclasses.fields(kind):
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{kind.__name__} needs a value for {field.name}")
    return kind(**values)


def _options_class(make: Factory) -> Any:
    function = make.__init__ if isinstance(make, type) else inspect.unwrap(make)
    try:
        kind = get_type_hints(function).get("options")
    except NameError as error:
        raise ValueError(f"cannot resolve the annotations of {make.__name__}: {error}") from None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"{make.__name__} must annotate its parameter `options` with a dataclass: got {kind}")
    return kind


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot split the options {printable(text, 60)!r} into words: {error}") from None
