"""The adapter to DeepEP (https://github.com/deepseek-ai/DeepEP), used only if the package `deep_ep` is installed.

library.py finds the package, backend.py is the backend.
"""

from .backend import DeepEP
from .library import missing_library

__all__ = ["DeepEP", "missing_library"]
