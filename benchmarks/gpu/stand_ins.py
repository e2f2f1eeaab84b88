"""Stand-ins for msgspec and tqdm, which the profiler imports, on a GPU machine that has torch and its libraries only.

They read recordings of this suite with the standard library, and show no progress.
"""

import importlib.util
import json
import sys
from types import SimpleNamespace
from typing import Any, get_args


class Struct:
    def __init_subclass__(cls, **_: Any):
        pass

    def __init__(self, *values: Any, **named: Any):
        vars(self).update(zip(type(self).__annotations__, values, strict=False), **named)


class Decoder:
    """Decodes JSON to the first of `kinds`, whose `traceEvents` the second is a list of."""

    def __init__(self, kinds: Any):
        self.kinds = get_args(kinds)

    def decode(self, data: bytes) -> Any:
        trace, (event,) = self.kinds[0], get_args(self.kinds[1])
        found = json.loads(data)
        return trace(**found | {"traceEvents": [event(**one) for one in found["traceEvents"]]})


def provide() -> None:
    """Let `import msgspec` and `import tqdm` find these, if they are not installed."""
    codec = SimpleNamespace(Decoder=Decoder, decode=lambda value: value, encode=json.dumps)
    found = SimpleNamespace(DecodeError=ValueError, Raw=bytes, Struct=Struct, json=codec)
    bars = SimpleNamespace(tqdm=lambda items, *_, **__: items)
    for name, modules in (("msgspec", {"msgspec": found, "msgspec.json": codec}), ("tqdm", {"tqdm": bars})):
        if not sys.modules.get(name) and importlib.util.find_spec(name) is None:
            sys.modules.update(modules)  # type: ignore[arg-type]
