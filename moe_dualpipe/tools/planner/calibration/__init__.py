"""Measure this machine for the planner: products, attention, passes over memory and links, written as a device file.

Processes that compute at the same time slow each other down, so all processes of a run measure at the same time.
"""

from .device_file import device_value, to_text
from .workers import Plan, measure

__all__ = ["Plan", "device_value", "measure", "to_text"]
