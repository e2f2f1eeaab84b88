"""Options that name your own layers, for commands that load a model: a checkpoint cannot choose what is imported."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class OwnLayers:
    """The model's own layers, FILE.py:CLASS or MODULE:CLASS. They must be named here, because importing a file runs its
    code."""

    experts: str | None = None
    """The model's own expert layer."""
    router: str | None = None
    """The model's own router."""
    attention: str | None = None
    """The model's own attention."""
    block: str | None = None
    """The model's own transformer block."""

    def named(self) -> dict[str, str | None]:
        return asdict(self)


NO_OWN_LAYERS = OwnLayers()
