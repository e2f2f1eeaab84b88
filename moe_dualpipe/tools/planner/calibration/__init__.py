"""Measure one device of this machine for the planner: products, attention and passes over memory, written as a device
file. Links are not measured: the file has a default to edit.
"""

from .device_file import device_value, to_text
from .kernels import measure

__all__ = ["device_value", "measure", "to_text"]
