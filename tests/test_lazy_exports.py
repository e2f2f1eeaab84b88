"""Packages that import their exports on first use."""

import importlib
import pkgutil
import sys

import pytest

from moe_dualpipe.lazy_exports import _origins

PACKAGES = ["models", "overlap", "runtime"]


@pytest.mark.parametrize("name", PACKAGES)
def test_every_export_is_found_where_the_init_imports_it(name):
    package = importlib.import_module(f"moe_dualpipe.{name}")
    for export in package.__all__:
        module, attribute = _origins(package.__name__)[export]
        origin = importlib.import_module(module, package.__name__)
        assert package.__getattr__(export) is getattr(package, export) is getattr(origin, attribute), export


@pytest.mark.parametrize("name", PACKAGES)
def test_no_export_has_the_name_of_a_submodule(name):
    """Importing the submodule would replace the export."""
    package = importlib.import_module(f"moe_dualpipe.{name}")
    assert not {*package.__all__} & {module.name for module in pkgutil.iter_modules(package.__path__)}


@pytest.mark.parametrize("name", [*PACKAGES, "kernels"])
def test_an_unknown_name_is_an_attribute_error(name):
    package = importlib.import_module(f"moe_dualpipe.{name}")
    assert not hasattr(package, "Modle")
    with pytest.raises(ImportError, match="cannot import name 'Modle'"):
        exec(f"from moe_dualpipe.{name} import Modle")


def test_kernels_are_imported_as_modules():
    kernels = importlib.import_module("moe_dualpipe.kernels")
    for name in kernels.__all__:
        assert kernels.__getattr__(name) is sys.modules[f"moe_dualpipe.kernels.{name}"]
