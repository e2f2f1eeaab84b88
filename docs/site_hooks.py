"""MkDocs hook: links to repository files outside docs/ become plain code, because the site does not contain them."""

import re

_LINK = re.compile(r"\[([^\]]+)\]\(\.\./(?!images/)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace `[text](../path)` by `text` as code.

    Example: "[the loop](../moe_dualpipe/training/loop.py)" -> "`the loop`".
    """
    return _LINK.sub(lambda link: link[1] if "`" in link[1] else f"`{link[1]}`", markdown)
