"""Stand-ins for msgspec and tqdm, which the profiler imports, on a GPU machine that has torch and its libraries only.

They decode the small recordings of this suite with the standard library, and show no progress.
"""

import importlib.util
import json
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, get_args


class Raw(bytes):
    """JSON that is decoded later."""


class Struct:
    def __init_subclass__(cls, **_: Any):
        dataclass(cls)


class Decoder:
    """Decodes an object to the Struct among `kinds`, and the objects of a list, or of an annotated field, to theirs."""

    def __init__(self, kinds: Any):
        self.kinds = get_args(kinds) or (kinds,)

    def decode(self, data: bytes) -> Any:
        return _built(self.kinds, json.loads(data))


def _built(kinds: tuple[Any, ...], value: Any) -> Any:
    (struct,) = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Struct))
    names = struct.__annotations__
    found = {name: value[name] for name in names.keys() & value.keys()}
    if "args" in found:
        found["args"] = Raw(json.dumps(found["args"]).encode())
    if "traceEvents" in found:
        found["traceEvents"] = [_built(get_args(names["traceEvents"]), event) for event in found["traceEvents"]]
    return struct(**found)


def provide() -> None:
    """Let `import msgspec` and `import tqdm` find these, if they are not installed."""
    codec = ModuleType("msgspec.json")
    vars(codec).update(Decoder=Decoder, decode=json.loads, encode=lambda value: json.dumps(value).encode())
    found = ModuleType("msgspec")
    vars(found).update(DecodeError=ValueError, Raw=Raw, Struct=Struct, json=codec)
    bars: Any = SimpleNamespace(tqdm=lambda items, *_, **__: items)
    for name, modules in {"msgspec": {"msgspec": found, "msgspec.json": codec}, "tqdm": {"tqdm": bars}}.items():
        if importlib.util.find_spec(name) is None:
            sys.modules.update(modules)
