"""Run kernels with a change in their source."""

import importlib.util
import sys
from pathlib import Path

import pytest

from moe_dualpipe.kernels import gpu

FILES = ("signals", "push", "receive")  # each imports from those before it


def change_source(monkeypatch: pytest.MonkeyPatch, folder: Path, file: str, changes: dict[str, str]) -> None:
    """Replace texts that occur once in a file of kernels/gpu, for those who import it from now on.

    folder: where the changed files are written.
    """
    for name in FILES:
        module = f"{gpu.__name__}.{name}"
        text = (Path(gpu.__file__).parent / f"{name}.py").read_text()
        for old, new in changes.items() if name == file else ():
            assert text.count(old) == 1, f"{text.count(old)} times in {file}: {old}"
            text = text.replace(old, new)
        (path := folder / f"{name}.py").write_text(text)
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None and spec.loader is not None
        changed = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module, changed)
        spec.loader.exec_module(changed)
