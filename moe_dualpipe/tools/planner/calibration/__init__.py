"""Measure this machine for the planner: products, attention, passes over memory and links, written as a device file.

Processes that compute at the same time slow each other down, so all processes of a run measure at the same time.
"""

from typing import TYPE_CHECKING

from ....lazy_exports import on_first_use

if TYPE_CHECKING:
    from .device_file import device_value, to_text
    from .workers import Plan, measure

__all__ = ["Plan", "device_value", "measure", "to_text"]

__getattr__ = on_first_use(__name__)
