"""The names in a profiler's trace. The code that writes them and the code that reads them both use this list.

    attn(F)                  a segment of a forward; (B): of a backward, (I): input gradients, (W): weight gradients
    prepare dispatch(F)      the setup of a transfer
    wait for dispatch(F)     a wait for a transfer; "wait for sizes": for the number of rows of each rank
    link::carry              a call that starts a transfer over a modelled link
    link:carry               that transfer, from its start to its end
    step 12                  a training step: the pipeline's actions ("0F3", see schedule/actions.py), then STEP_PARTS

This module imports neither torch nor the rest of this package, so that traces can be read without torch.
"""

import re

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
DISPATCH, COMBINE, LOSS = "dispatch", "combine", "loss"  # segments; attn, mlp, ... are named where they are computed

LINK = "link"
LINK_CALL, LINK_TRANSFER = f"{LINK}::carry", f"{LINK}:carry"

STEP_PARTS = GRADIENTS, OPTIMIZER = "gradients", "optimizer"
"""What follows the pipeline in a step: the sum over replicas with the norm, and the update."""

_PREPARE, _WAIT, _STEP = "prepare ", "wait for ", "step "
_KIND = re.compile(r"\(([FBIW])\)$")
_EXPERTS = re.compile(rf"({_PREPARE})?({DISPATCH}|{COMBINE})\(")


def label(name: str, kind: str) -> str:
    """The label of a segment: `label("attn", FORWARD)` is "attn(F)"."""
    return f"{name}({kind})"


def prepare(name: str) -> str:
    return _PREPARE + name


def wait_for(name: str) -> str:
    return _WAIT + name


def training_step(number: int) -> str:
    return f"{_STEP}{number}"


SIZES_WAIT = wait_for("sizes")


def letter_of(text: str) -> str | None:
    """The letter of a segment's label: F for "attn(F)"; None for any other text."""
    found = _KIND.search(text)
    return found[1] if found else None


def is_wait(text: str) -> bool:
    return text.startswith(_WAIT)


def without_wait(text: str) -> str:
    """The transfer that is waited for: "dispatch(F)" for "wait for dispatch(F)", and for "dispatch(F)"."""
    return text.removeprefix(_WAIT)


def is_for_experts(text: str) -> bool:
    """Whether the label is of a dispatch or a combine, or of the setup of one."""
    return _EXPERTS.match(text) is not None


def step_number(text: str) -> int | None:
    """12 for "step 12"; None for any other text."""
    number = text.removeprefix(_STEP)
    return int(number) if number != text and number.isdecimal() else None
