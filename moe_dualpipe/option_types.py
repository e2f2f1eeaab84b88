"""Types of options whose values are names in a table: the help lists the names."""

from collections.abc import Iterable
from typing import Annotated, Any

from tyro.conf import arg

from .models import PRESETS
from .schedule import NAMES


def one_of(names: Iterable[str]) -> Any:
    """Shows the names in the help, as tyro shows those of a Literal. Does not check them."""
    return arg(metavar=f"{{{','.join(names)}}}")


PresetName = Annotated[str, one_of(PRESETS)]
OptionalPreset = Annotated[str | None, one_of(PRESETS)]
ScheduleName = Annotated[str, one_of(("auto", *NAMES))]
