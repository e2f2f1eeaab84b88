"""Write the operators of kernels/ in the layout of Hugging Face's kernel hub.

    python -m kernel_hub build/kernel-hub          # writes build/kernel-hub/moe-dualpipe-kernels

The hub's loader imports a kernel from a folder that is not on `sys.path`, under a name that is unique to its version.
So a kernel may import its own modules only relatively, as kernels/ does. The repository has:

    build.toml, torch-ext/<package>/      the source, for the hub's own `kernel-builder`
    build/torch-universal/                the same modules, ready to be loaded: they are Python only
    build/torch-universal/metadata.json   name, version, id and the digest of each file
    README.md, LICENSE

The format is that of huggingface/kernels 0.17: docs/source/kernel-requirements.md in its repository.
"""

import argparse
import base64
import hashlib
import json
import shutil
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
OLD_LOADERS = '''"""For loaders that expect a folder with the name of the kernel: the package in the folder above."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("{id}", Path(__file__).parents[1] / "__init__.py")
_package = sys.modules.get("{id}")
if _package is None:
    _package = sys.modules["{id}"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_package)
__all__ = _package.__all__
globals().update({{name: getattr(_package, name) for name in __all__}})
'''


def build(folder: Path) -> Path:
    """Write the repository into `folder`, replacing an older one. Returns its path."""
    general = tomllib.loads((HERE / "build.toml").read_text())["general"]
    repository = folder / general["name"]
    shutil.rmtree(repository, ignore_errors=True)
    package, variant = general["name"].replace("-", "_"), repository / "build" / "torch-universal"
    for modules in (variant, repository / "torch-ext" / package):
        shutil.copytree(ROOT / "kernels", modules, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copyfile(HERE / "package.py", modules / "__init__.py")
    for source, name in ((HERE / "build.toml", "build.toml"), (HERE / "CARD.md", "README.md"), (ROOT / "LICENSE", "")):
        shutil.copyfile(source, repository / (name or source.name))
    sources = hashlib.sha256("".join(_digests(variant).values()).encode()).hexdigest()
    identifier = f"_{package}_{sources[:7]}"
    (variant / package).mkdir()
    (variant / package / "__init__.py").write_text(OLD_LOADERS.format(id=identifier))
    metadata = {
        "name": general["name"],
        "id": identifier,
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": "cuda"},  # the format has no value for all backends; the name of the folder says it
        "digest": {"algorithm": "sha256", "files": _digests(variant)},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return repository


def _digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file below `folder`, in base64, by relative path."""
    return {
        path.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="write the repository into this folder")
    print(build(parser.parse_args().folder))


if __name__ == "__main__":
    main()
