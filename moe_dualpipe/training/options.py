"""The options of train.py: one TrainConfig from flags, `--set`, a TOML file or an earlier run, and back to run.toml.

A key is a field of TrainConfig with its section, such as "optim.lr". Any key can be set in a TOML file and by
`--set optim.lr=0.001`; the keys in FLAGS also have a flag. The command line overrides the file, which overrides the
preset.
"""

import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any

from ..checkpoint.destinations import run_of
from ..command_line import Option, OptionError, entry, options_of, parser_of, shown, unknown_option
from ..data import stores
from ..data.strict_json import reading
from ..health.report import program_name
from ..messages import printable, quoted, shell_word, typed_text
from ..models import PRESETS
from ..models.config import BUILT_IN
from ..schedule import FILL, NAMES
from ..schedule.schedule_file import is_file_name
from .config import DEFAULT_PRESET, CheckpointConfig, TrainConfig

FLAGS: dict[str, str] = {
    "preset": "preset", "steps": "steps", "seed": "seed", "timeout": "health.timeout",
    "traceback": "health.traceback", "freeze": "freeze", "lora": "lora.rank",
    "pp": "parallel.pp", "ep": "parallel.ep", "cp": "parallel.cp", "schedule": "parallel.schedule",
    "ep-backend": "parallel.ep_backend",
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
    "pp", "ep", "schedule", "device", "recompute", "out", "resume", "weights", "lora", "save-every", "eval-every",
    "export", "profile", "prompt",
)  # fmt: skip
OPTIONS_FILE = "run.toml"
_FLAG_OF = {key: flag for flag, key in FLAGS.items()}
_CHOICES = {"preset": (*PRESETS,), "parallel.schedule": ("auto", *NAMES)}
_ONCE = (
    "checkpoint.resume",
    "checkpoint.weights",
    "checkpoint.weights_partial",
    "checkpoint.export",
    "metrics.profile",
    "lora.adapter",
)
"""Keys of a run that do not hold for its continuation."""
_WRITTEN = (
    "checkpoint.out", "checkpoint.export", "checkpoint.staging", "batch.record_routes", "metrics.wandb",
)  # fmt: skip
"""Keys that say where a run writes."""
_CHOSEN = (
    "parallel.pp", "parallel.schedule", "batch.micro_batch_size", "compute.compile", "compute.dtype",
    "optim.name", "optim.lr",
)  # fmt: skip
"""Keys that a run may choose itself."""
_CHANGES = {
    "data": (
        "seed", "batch.data", "batch.seq_len", "batch.batch_size", "metrics.eval_sequences", "batch.chat_template",
        "batch.train_on", "batch.packing", "batch.too_long", "batch.special_tokens",
    ),
    "mathematics": (
        "steps", "bias_rate", "freeze", "lora.", "optim.", "model.", "batch.document_mask", "compute.dtype",
        "parallel.expert_sums", "compute.fp8", "batch.replay_routes",
    ),
    "order of the work": ("parallel.schedule",),
}  # fmt: skip
"""What a resumed run does otherwise if a key with this beginning has another value. Rounding is not meant."""
_REPLACED = {
    "micro_batches": "; use --batch-size, the number of sequences per step over all ranks",
    "place_experts": "; use --set parallel.move_experts_every=STEPS",
    "elastic": ": a restarted run adapts its layout to the number of processes",
    "data_cache": ": files at a URL are copied to the local disk",
    "data_cache_gb": ": files at a URL are copied to the local disk",
}


# ---- Keys ----


class Key(Option):
    """A key of TOML files and of --set; some are flags, too."""

    __slots__ = ()

    def accepts(self, name: str) -> bool:
        """Whether a word is one of the choices, or a file or a filled schedule that may stand for one."""
        if self.name == "parallel.schedule":
            return is_file_name(name) or name.removesuffix(FILL) in self.choices
        return name in self.choices

    def convert(self, value: Any, strict: bool = False) -> Any:
        """As `Option.convert`. "" and 0 are None, too, where that is valid; options of layers may be a table.

        A learning rate of 0 is a mistake.
        """
        zero_is_none = str not in self.kinds and self.name != "optim.lr"
        if NoneType in self.kinds and (value == "" or (zero_is_none and value in (0, "0"))):
            return None
        if self.name.endswith("_options") and isinstance(value, Mapping):
            return value
        if self.name == "sample.prompt" and isinstance(value, str):
            return typed_text(value)
        return super().convert(value, strict)


@cache
def all_keys() -> dict[str, Key]:
    """The keys of TrainConfig in order, by name."""
    found = {}
    for option in options_of(TrainConfig):
        name, names = option.name, _CHOICES.get(option.name, ())
        text_only = str in option.kinds and NoneType not in option.kinds  # in Python, a layer may be a class
        kind = str if text_only else option.kind
        found[name] = Key(name, kind, option.default, option.text, option_name(name), names=names)
    return found


def option_name(key: str) -> str:
    """How messages name a key: as its flag if it has one, such as "--lr"."""
    return f"--{_FLAG_OF[key]}" if key in _FLAG_OF else key


def value_of(config: TrainConfig, key: str) -> Any:
    return attrgetter(key)(config)


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
    if base:
        _check_trust(Path(file) if file else _run_file(resume or ""), base, typed)
    config = build_config(base | typed, defaults)
    if not base:
        return Request(config, frozenset(typed))
    old = build_config(base | {"checkpoint.resume": resume} if resume else base, defaults)
    changed = [key for key in typed if key not in _ONCE and value_of(old, key) != value_of(config, key)]
    return Request(config, frozenset(changed), saved, from_file=True)


def _check_trust(file: Path | None, values: Mapping[str, Any], typed: Mapping[str, Any]) -> None:
    """Raise OptionError if a file from elsewhere names code or outputs that the command line does not name."""
    named = {} if file is None else _must_be_typed(file, values)
    if words := [word for key, word in named.items() if key not in typed]:
        what = f"{printable(file)} is not in the current folder and names code or outputs"
        raise OptionError(f"{what}: if you trust it, add {' '.join(words)}")


def words_to_resume(folder: Path, config: TrainConfig) -> list[str]:
    """What to type beside `--resume folder` of a run with these options, quoted for a shell."""
    kept = {key: value_of(config, key) for key in all_keys() if key not in (*_ONCE, "checkpoint.out")}
    return [*_must_be_typed(folder / OPTIONS_FILE, kept).values()]


def _must_be_typed(file: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """What to type for the code and the outputs in `values`, by key. Empty for a file in or below the current folder.

    A file from elsewhere may be that of a stranger.
    """
    if stores.url_of(file) is None and Path(os.path.abspath(file)).is_relative_to(Path.cwd()):
        return {}
    named = {key: values.get(key) for key in _WRITTEN}
    if resume := values.get("checkpoint.resume"):
        named["checkpoint.out"] = named["checkpoint.out"] or run_of(resume)
    layers = {f"model.{kind}": values.get(f"model.{kind}", built_in[0]) for kind, built_in in BUILT_IN.items()}
    named |= {key: layer for key, layer in layers.items() if layer not in BUILT_IN[key.removeprefix("model.")]}
    return {
        key: f"--{_FLAG_OF[key]} {shell_word(value)}" if key in _FLAG_OF else f"--set {shell_word(f'{key}={value}')}"
        for key, value in named.items() if value
    }  # fmt: skip


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
    with reading(path):
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    values = {}
    for name, value in tables.items():
        entries = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        for key, one in entries.items():
            try:
                values[key] = find_key(key).convert(one)
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


def _parse_flags(arguments: Sequence[str], quiet: bool) -> tuple[dict[str, Any], str | None]:
    """The values on the command line, by key, and the TOML file, if there is one."""
    flags = [all_keys()[name] for name in FLAGS.values()]
    parser = parser_of(flags)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--set", nargs="+", action="extend", default=[])
    for name in ("-h", "--help", "--help-all"):
        parser.add_argument(name, action="store_true")
    given, unknown = parser.parse_known_args(arguments)
    if given.h or given.help or given.help_all:
        try:
            if not quiet:
                print(help_text(every_key=given.help_all), flush=True)
        except BrokenPipeError:  # the reader, such as `head`, has closed the pipe; Python would flush again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)
    if unknown:
        raise _unknown("option", unknown[0], _typed_options())
    if given.file is not None and not given.file.endswith(".toml"):
        raise OptionError(f"unexpected {quoted(given.file, 60)}: a file of options ends with .toml")
    words = ((key, getattr(given, key.name)) for key in flags)
    values = {key.name: key.convert(word) for key, word in words if word is not None}
    for word in given.set:
        name, equals, value = word.partition("=")
        if not equals:
            raise OptionError(f"--set needs KEY=VALUE, such as optim.beta2=0.99: got {quoted(word, 60)}")
        section, _, inner = name.rpartition(".")
        if section.endswith("_options"):  # model.expert_options.rank=8
            values.setdefault(section, {})[inner] = value
        else:
            values[name] = find_key(name).convert(value)
    return values, given.file


def find_key(name: str) -> Key:
    """Raises OptionError, with the nearest name, for a key that does not exist."""
    if name not in all_keys():
        raise _unknown("key", name, {key: key for key in all_keys()})
    return all_keys()[name]


def _unknown(kind: str, word: str, typed: Mapping[str, str]) -> OptionError:
    """Names what replaces a removed option, or suggests a similar one. typed: what to type, by name."""
    word = word.partition("=")[0]
    last = word.lstrip("-").replace("-", "_").rpartition(".")[2]
    if last in _REPLACED:
        return OptionError(f"{word} was removed{_REPLACED[last]}")
    return OptionError(f"{unknown_option(kind, word, typed)}--help-all lists all")


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
    return entry(name, "BOOL" if key.kind is bool else key.metavar, key.text, default, most)
