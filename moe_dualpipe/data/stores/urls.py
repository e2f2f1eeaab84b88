"""The address of a file or folder on an object store."""

import re
from dataclasses import dataclass

from ...messages import quoted

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)


def is_url(text: object) -> bool:
    """Whether `text` is a URL such as s3://bucket/run. A file:// URL is a local path."""
    match = _URL.fullmatch(str(text))
    return match is not None and match[1] not in ("file", "local")


@dataclass(frozen=True, slots=True)
class Url:
    """A URL without a slash at its end. `url / "name"` is below it.

    Raises ValueError for one without a path, and for one with a password: run.toml would keep it.
    """

    text: str

    def __post_init__(self) -> None:
        match = _URL.fullmatch(self.text)
        if match is None or not match[2].strip("/"):
            raise ValueError(f"{quoted(self.text)} names no bucket or folder: write, for example, s3://bucket/run")
        if ":" in match[2].partition("/")[0] and "@" in match[2]:
            raise ValueError(
                f"{quoted(self.text)} holds a password: remove it, and set it in the environment (docs/storage.md)"
            )
        object.__setattr__(self, "text", f"{match[1]}://{match[2].strip('/')}")

    @property
    def scheme(self) -> str:
        return self.text.partition("://")[0]

    @property
    def bucket(self) -> str:
        return self.text.partition("://")[2].partition("/")[0]

    @property
    def key(self) -> str:
        """The path below the bucket."""
        return self.text.partition("://")[2].partition("/")[2]

    @property
    def name(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        return Url(self.text.rpartition("/")[0])

    def __truediv__(self, name: object) -> "Url":
        return Url(f"{self.text}/{name}")

    def __str__(self) -> str:
        return self.text
