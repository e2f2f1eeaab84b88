"""The options of train.py: one TrainConfig from flags, `--set`, a TOML file or an earlier run, and back to run.toml.

A key is a field of TrainConfig with its section, such as "optim.lr". Any key can be set in a TOML file and by
`--set optim.lr=0.001`; the keys in FLAGS also have a flag. The command line overrides the file, which overrides the
preset.
"""

import json
import os
import sys
import tomllib
import typing
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn

from ..checkpoint.destinations import run_of
from ..data import stores
from ..health.program import program_name
from ..messages import printable, quoted, typed_text, unknown_name
from ..models import PRESETS
from ..option_help import entry, fields_of, metavar, shown
from ..schedule import FILL, NAMES
from ..schedule.schedule_file import is_file_name
from .config import DEFAULT_PRESET, CheckpointConfig, TrainConfig

FLAGS: dict[str, str] = {
    "preset": "preset", "steps": "steps", "seed": "seed", "timeout": "health.timeout",
    "traceback": "health.traceback", "freeze": "freeze",
    "pp": "parallel.pp", "ep": "parallel.ep", "ep-backend": "parallel.ep_backend", "schedule": "parallel.schedule",
    "device": "compute.device", "dtype": "compute.dtype", "kernels": "compute.kernels", "compile": "compute.compile",
    "recompute": "compute.recompute", "fused-loss": "compute.fused_loss",
    "data": "batch.data", "seq-len": "batch.seq_len", "batch-size": "batch.batch_size",
    "micro-batch-size": "batch.micro_batch_size", "document-mask": "batch.document_mask",
    "out": "checkpoint.out", "resume": "checkpoint.resume", "weights": "checkpoint.weights",
    "weights-partial": "checkpoint.weights_partial", "save-every": "checkpoint.save_every", "keep": "checkpoint.keep",
    "export": "checkpoint.export",
    "log-every": "metrics.log_every", "eval-every": "metrics.eval_every", "wandb": "metrics.wandb",
    "profile": "metrics.profile",
    "sample-tokens": "sample.sample_tokens", "prompt": "sample.prompt",
    "optimizer": "optim.name", "lr": "optim.lr", "lr-schedule": "optim.schedule", "warmup-steps": "optim.warmup_steps",
    "weight-decay": "optim.weight_decay", "clip": "optim.clip",
    "experts": "model.experts", "attention": "model.attention", "router": "model.router", "block": "model.block",
    "num-layers": "model.num_layers", "num-experts": "model.num_experts",
}  # fmt: skip
TYPED_FIRST = (
    "preset", "steps", "data", "seq-len", "batch-size", "lr", "optimizer", "num-layers", "num-experts", "experts",
    "pp", "ep", "schedule", "device", "recompute", "out", "resume", "weights", "save-every", "eval-every", "export",
    "profile", "prompt",
)  # fmt: skip
OPTIONS_FILE = "run.toml"
_FLAG_OF = {key: flag for flag, key in FLAGS.items()}
_CHOICES = {"preset": [*PRESETS], "parallel.schedule": ["auto", *NAMES]}
_ONCE = (
    "checkpoint.resume",
    "checkpoint.weights",
    "checkpoint.weights_partial",
    "checkpoint.export",
    "metrics.profile",
)
"""Keys of a run that do not hold for its continuation."""
_CHOSEN = (
    "parallel.pp", "parallel.schedule", "batch.micro_batch_size", "compute.compile", "compute.dtype",
)  # fmt: skip
"""Keys that a run may choose itself."""
_CHANGES = {
    "data": (
        "seed", "batch.data", "batch.seq_len", "batch.batch_size", "metrics.eval_sequences",
    ),
    "mathematics": (
        "steps", "bias_rate", "freeze", "optim.", "model.", "batch.document_mask", "compute.dtype",
        "parallel.expert_sums",
    ),
}  # fmt: skip
"""What a resumed run does otherwise if a key with this beginning has another value. Rounding is not meant."""
_REPLACED = {
    "micro_batches": "; use --batch-size, the number of sequences per step over all ranks",
    "place_experts": "; use --set parallel.move_experts_every=STEPS",
    "elastic": ": a restarted run adapts its layout to the number of processes",
    "data_cache": ": files at a URL are copied to the local disk",
    "data_cache_gb": ": files at a URL are copied to the local disk",
}


class OptionError(ValueError):
    """An option that does not exist, or a value that it cannot have."""


# ---- Keys ----


@dataclass(frozen=True, slots=True)
class Key:
    """kind: the type of its value. text: the help."""

    name: str
    kind: Any
    default: Any
    text: str

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of the value; NoneType is last, if the value may be None."""
        union = typing.get_origin(self.kind) in (typing.Union, type(int | None))
        return typing.get_args(self.kind) if union else (self.kind,)

    @property
    def choices(self) -> list[str]:
        literal = typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()
        return _CHOICES.get(self.name, [*literal])

    def accepts(self, value: object) -> bool:
        """Whether a value is one of the choices, or a file or a filled schedule that may stand for one."""
        if self.name == "parallel.schedule":
            return is_file_name(str(value)) or str(value).removesuffix(FILL) in self.choices
        return value in self.choices

    @property
    def metavar(self) -> str:
        if self.choices:
            return f"{{{','.join(self.choices)}}}"
        return "BOOL" if self.kind is bool else metavar(self.kind)


@cache
def all_keys() -> dict[str, Key]:
    """The keys of TrainConfig in order, by name."""
    found = {}
    for section, kind, default, text in fields_of(TrainConfig):
        inner = fields_of(kind) if is_dataclass(kind) else [("", kind, default, text)]
        for name, *rest in inner:
            key = f"{section}.{name}" if name else section
            found[key] = Key(key, *rest)
    return found


def option_name(key: str) -> str:
    """How messages name a key: as its flag if it has one, such as "--lr"."""
    return f"--{_FLAG_OF[key]}" if key in _FLAG_OF else key


def value_of(config: TrainConfig, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def convert(key: Key, value: Any) -> Any:
    """The value of a key, from a word of a command line or from TOML. 0, "" and "none" are None where that is valid.

    Raises OptionError for a value of another type.
    """
    kinds, name = key.kinds, option_name(key.name)
    if NoneType in kinds and (value in ("", "none", "None") or (value in (0, "0") and str not in kinds)):
        return None
    if key.choices and isinstance(value, str):
        if not key.accepts(value):
            raise OptionError(str(unknown_name(name, value, key.choices)))
        return value
    kind = kinds[0]
    if typing.get_origin(kind) is tuple:
        words = value.split(",") if isinstance(value, str) else value
        entry = Key(key.name, typing.get_args(kind)[0], None, "")
        if isinstance(words, list | tuple):
            return tuple(convert(entry, word) for word in words)
    elif kind is bool:
        truth = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
        if isinstance(truth, bool):
            return truth
    elif kind in (int, float):
        if isinstance(value, str) or (type(value) in (int, float) and kind(value) == value):
            try:
                return kind(value)
            except ValueError:
                pass
    elif isinstance(value, str) or (key.name.endswith("_options") and isinstance(value, Mapping)):
        return typed_text(str(value)) if key.name == "sample.prompt" else value
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, "a list")
    raise OptionError(f"{name} must be {wanted}: got {quoted(value, 60)}")


# ---- From text to a TrainConfig ----


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. typed: keys set on the command line to a value that differs from the file.

    saved: the values in run.toml of the run that is resumed, by key.
    """

    config: TrainConfig
    typed: frozenset[str] = field(default_factory=frozenset)
    saved: Mapping[str, Any] | None = None
    from_file: bool = False
    """Whether other options come from a TOML file or from the run that is resumed."""


def parse(arguments: Sequence[str], quiet: bool = False, defaults: TrainConfig | None = None) -> Request:
    """Read a command line. `--help` prints and exits. quiet: print nothing. defaults: of all keys but those of `model`.

    Raises OptionError and, for a file or folder that cannot be read, ValueError.
    """
    typed, file = _parse_flags(arguments, quiet)
    resume = typed.get("checkpoint.resume")
    if file is not None and resume:
        raise OptionError(f"{printable(file)} and --resume both say what to run: use one of them")
    if resume and (given := resume.removesuffix(f"/{OPTIONS_FILE}")) != resume:
        raise OptionError(f"--resume {printable(resume)} names a file: use --resume {printable(given)}")
    saved = saved_values(resume)
    base = dict(saved or {}) if file is None else read_toml(Path(file))
    if "preset" in typed or "checkpoint.weights" in typed:
        base = {key: value for key, value in base.items() if not key.startswith("model.") and key != "preset"}
    config = build_config(base | typed, defaults)
    if not base:
        return Request(config, frozenset(typed))
    old = build_config(base | {"checkpoint.resume": resume} if resume else base, defaults)
    changed = [key for key in typed if key not in _ONCE and value_of(old, key) != value_of(config, key)]
    return Request(config, frozenset(changed), saved, from_file=True)


def saved_values(resume: str | None) -> dict[str, Any] | None:
    """The values that a continuation of the run takes from its run.toml, by key. None without such a file."""
    if not resume or (file := _run_file(resume)) is None:
        return None
    return {key: value for key, value in read_toml(file).items() if key not in _ONCE}


def changes(saved: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """How the options of a resumed run differ from its run.toml, one text each, such as "optim.lr 0.1 -> 0.2"."""
    old, texts = build_config(saved), []
    for key in all_keys():
        before, now = value_of(old, key), value_of(config, key)
        chosen = key in _CHOSEN and before in (None, "auto")
        if before == now or chosen or key in (*_ONCE, "preset", "checkpoint.out"):
            continue
        effect = [f"; this changes the {what}" for what, keys in _CHANGES.items() if key.startswith(keys)]
        texts.append(f"{key} {quoted(before)} -> {quoted(now)}{''.join(effect)}")
    return texts


def parse_arguments(arguments: Sequence[str], defaults: TrainConfig | None = None) -> TrainConfig:
    """The options on a command line; see `parse`."""
    return parse([*map(str, arguments)], defaults=defaults).config


def build_config(values: Mapping[str, Any], defaults: TrainConfig | None = None) -> TrainConfig:
    """The configuration with these values, by key. Raises ValueError for values that contradict each other."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    top, config = sections.pop("", {}), defaults or TrainConfig(preset=DEFAULT_PRESET)
    start = sections.get("checkpoint", {})
    start = CheckpointConfig(**{name: start[name] for name in ("resume", "weights") if name in start})
    model = TrainConfig(preset=top.get("preset"), checkpoint=start).model
    changed = {name: replace(getattr(config, name), **values) for name, values in sections.items() if name != "model"}
    model = replace(model, **sections.get("model", {}))
    from_preset = not (start.resume or start.weights)
    return replace(config, **{"preset": DEFAULT_PRESET if from_preset else None, **top, **changed, "model": model})


def read_toml(path: Path) -> dict[str, Any]:
    """The values in a TOML file, by key. Raises ValueError for a file that cannot be read, and OptionError."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read {printable(path)}: {printable(reason)}") from None
    values = {}
    for name, value in tables.items():
        entries = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        for key, one in entries.items():
            try:
                values[key] = convert(find_key(key), one)
            except OptionError as error:
                raise OptionError(f"{printable(path)}: {error}") from None
    return values


def to_toml(config: TrainConfig) -> str:
    """All values of `config` but `checkpoint.out`, which is the folder of the file, as TOML. None is "none"."""
    lines, section = [], ""
    for key in sorted(all_keys(), key=lambda key: "." in key):  # keys without a section come first; stable
        if key == "checkpoint.out":
            continue
        if key.partition(".")[0] != section and "." in key:
            section = key.partition(".")[0]
            lines += ["", f"[{section}]"]
        lines.append(f"{key.rpartition('.')[2]} = {_shown(value_of(config, key))}")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    """A value in TOML: as in JSON, except infinity, and that TOML allows no control character but the tab."""
    if isinstance(value, float):
        return repr(value)
    text = json.dumps("none" if value is None else value, ensure_ascii=False, default=str)
    return text.replace("\x7f", "\\u007f")


def _run_file(resume: str) -> Path | None:
    """The run.toml of the run that has the folder or checkpoint `resume`; None for a run without one."""
    run = stores.local_path(run_of(resume))
    if stores.url_of(run) is not None:
        stores.open_folder(run)
    return found if (found := run / OPTIONS_FILE).is_file() else None


# ---- The command line ----


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(message.removeprefix("argument "))


def _parse_flags(arguments: Sequence[str], quiet: bool) -> tuple[dict[str, Any], str | None]:
    """The values on the command line, by key, and the TOML file, if there is one."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--set", nargs="+", action="extend", default=[])
    for name in ("-h", "--help", "--help-all"):
        parser.add_argument(name, action="store_true")
    for flag, name in FLAGS.items():
        key = all_keys()[name]
        if key.kind is bool:
            parser.add_argument(f"--{flag}", dest=name, action=BooleanOptionalAction, default=None)
        elif typing.get_origin(key.kinds[0]) is tuple:
            parser.add_argument(f"--{flag}", dest=name, nargs="+", action="extend")
        else:
            parser.add_argument(f"--{flag}", dest=name)
    given, unknown = parser.parse_known_args(arguments)
    if given.h or given.help or given.help_all:
        try:
            if not quiet:
                print(help_text(every_key=given.help_all), flush=True)
        except BrokenPipeError:  # the reader, such as `head`, has closed the pipe; Python would flush again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)
    if unknown:
        raise OptionError(_unknown("option", unknown[0].partition("=")[0], _typed_options()))
    if given.file is not None and not given.file.endswith(".toml"):
        raise OptionError(f"unexpected {quoted(given.file, 60)}: a file of options ends with .toml")
    values = {
        name: convert(all_keys()[name], value) for name in FLAGS.values() if (value := getattr(given, name)) is not None
    }
    for word in given.set:
        name, equals, value = word.partition("=")
        if not equals:
            raise OptionError(f"--set needs KEY=VALUE, such as optim.beta2=0.99: got {quoted(word, 60)}")
        section, _, inner = name.rpartition(".")
        if section.endswith("_options"):  # model.expert_options.rank=8
            values.setdefault(section, {})[inner] = value
        else:
            values[name] = convert(find_key(name), value)
    return values, given.file


def find_key(name: str) -> Key:
    """Raises OptionError, with the nearest name, for a key that does not exist."""
    if name not in all_keys():
        raise OptionError(_unknown("key", name, {key: key for key in all_keys()}))
    return all_keys()[name]


def _unknown(kind: str, word: str, typed: Mapping[str, str]) -> str:
    """Suggests a name in another section or spelling, or a similar one. typed: what to type, by name."""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")[:100]
    last = name.rpartition(".")[2].removeprefix("no_")
    if last in _REPLACED:
        return f"{word} was removed{_REPLACED[last]}"
    shown = {f"--{one}": text for one, text in typed.items()}  # a short word is nearer with its dashes
    same = [name] * (name in typed) or [one for one in typed if one.rpartition(".")[2] == last]
    near = [typed[one] for one in same] or [*map(shown.get, get_close_matches(f"--{name}", shown, n=1))]
    return f"unknown {kind} {quoted(word, 60)}; {f'did you mean {near[0]}? ' if near else ''}--help-all lists all"


def _typed_options() -> dict[str, str]:
    """What to type on a command line, by the name of a flag and by key."""
    flags = {flag.replace("-", "_"): f"--{flag}" for flag in FLAGS}
    others = {key: f"--set {key}{'.NAME' * key.endswith('_options')}=VALUE" for key in all_keys()}
    flags["set"] = "--set"
    return flags | {key: option_name(key) if key in _FLAG_OF else other for key, other in others.items()}


_USAGE = """\
{program}: train a Mixture-of-Experts transformer with pipeline parallelism

  python train.py                                  one process
  torchrun --nproc-per-node 2 train.py             two pipeline ranks, DualPipe
  torchrun --nproc-per-node 4 train.py --ep 2      experts spread over two ranks
  python train.py runs/tiny/run.toml --steps 640   the options of a file, one of them changed
  python train.py --set optim.beta2=0.99           any other key
"""


def help_text(every_key: bool) -> str:
    """The help: what people type first, or every key with its section."""
    lines = [_USAGE.format(program=program_name())]
    if not every_key:
        lines += [_entry(f"--{flag}", all_keys()[FLAGS[flag]], most=110) for flag in TYPED_FIRST]
        return "\n".join([*lines, "", "--help-all lists the other flags, and every key of --set and of TOML files."])
    lines.append('"none" leaves a value unset. Flags of BOOL keys take no value: --fused-loss, --no-fused-loss.')
    for section, keys in sections().items():
        lines += [""] + [f"[{section}]"] * bool(section)
        lines += [
            _entry(f"{key.name} (--{_FLAG_OF[key.name]})" if key.name in _FLAG_OF else key.name, key) for key in keys
        ]
    return "\n".join(lines)


def sections() -> dict[str, list[Key]]:
    """The keys of each section in order; "" has those without one."""
    found: dict[str, list[Key]] = {}
    for key in all_keys().values():
        found.setdefault(key.name.rpartition(".")[0], []).append(key)
    return found


def _entry(name: str, key: Key, most: int | None = None) -> str:
    default = None if key.name == "preset" else shown(key.default) if key.kind is bool else key.default
    return entry(name, key.metavar, key.text, default, most)
