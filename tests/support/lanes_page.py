"""Read what the web page of lanes shows in a browser: its time axis, and what it has drawn (canvas_recorder.js)."""

import re
from itertools import pairwise
from typing import Any

from .browser import Page

AXIS, MARGIN = 112, 12  # pixels of a canvas left and right of the time axis


def shown(page: Page) -> tuple[float, float]:
    """The part of the time that is shown, in us, as the page says it: with four significant digits."""
    start, unit, end, other = re.match(r"([\d.]+) (\w+) to ([\d.]+) (\w+) ", page.text("#range")).groups()
    size = {"us": 1.0, "ms": 1e3, "s": 1e6}
    return float(start) * size[unit], float(end) * size[other]


def drawn(page: Page, canvas: str = "lanes") -> dict[str, Any]:
    return page.script("return window.drawn[given[0]]", canvas)


def axis(page: Page) -> float:
    """The width of the time axis, in pixels."""
    return page.script("return document.querySelector('#lanes').clientWidth") - AXIS - MARGIN


def x_of(page: Page, time: float) -> float:
    start, end = shown(page)
    return AXIS + (time - start) / (end - start) * axis(page)


def rects(page: Page, color: str, canvas: str = "lanes") -> list[dict[str, Any]]:
    return [rect for rect in drawn(page, canvas)["rects"] if rect["color"] == color]


def row_of(page: Page, color: str) -> float:
    """The middle of the row in which this color is drawn."""
    rect = max(rects(page, color), key=lambda rect: rect["height"])
    return rect["y"] + rect["height"] / 2


def label_errors(page: Page) -> tuple[list[dict[str, Any]], set[str]]:
    """Labels in the lanes that leave the boxes below them or touch another label, and the texts of all labels."""
    boxes, texts = drawn(page)["rects"], [text for text in drawn(page)["texts"] if text["x"] >= AXIS]

    def inside(x: float, y: float) -> bool:
        fits = (b for b in boxes if b["x"] - 0.1 <= x <= b["x"] + b["width"] + 0.6)  # half a pixel between boxes
        return any(b["y"] <= y <= b["y"] + b["height"] for b in fits)

    texts.sort(key=lambda text: (text["y"], text["x"]))
    wrong = [
        text for text in texts
        if not inside(text["x"], text["y"]) or not inside(text["x"] + text["width"], text["y"])
    ]  # fmt: skip
    wrong += [b for a, b in pairwise(texts) if a["y"] == b["y"] and a["x"] + a["width"] > b["x"]]
    return wrong, {text["text"] for text in texts}
