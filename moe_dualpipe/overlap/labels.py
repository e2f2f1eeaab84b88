"""Names of the annotations in profiler traces, for the code that writes them and the code that reads them.

    attn(F)                  a segment of a forward; (B): of a backward, (I): input gradients, (W): weight gradients
    prepare dispatch(F)      the setup of a transfer
    wait for dispatch(F)     a wait for a transfer
    wait for sizes           a wait for the number of rows that each rank sends
    link::carry              a call that starts a transfer over a modeled link; link::carry of x: in the group x
    link:carry               that transfer, from its start to its end; link:carry of x: in the group x
    link::wait               a wait for a transfer, of a modeled link or of torch.distributed
    shared::send             a call that copies rows into memory shared with other ranks; shared::receive: out of it
    shared:send              the copies of that call; shared:receive: the wait for the other ranks, and the copies
    step 12                  a training step: the pipeline's actions ("0F3", see schedule/actions.py), then STEP_PARTS
    sum gradients of stage 3 the start of a sum over replicas, between actions
    gather weights of stage 3: the start of an all-gather of new weights

This module imports neither torch nor the rest of this package, so that traces can be read without torch.
"""

import re

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
LOSS = "loss"  # a segment; the others are named where they are computed or sent

LINK = "link"
LINK_CALL, LINK_TRANSFER, LINK_WAIT = f"{LINK}::carry", f"{LINK}:carry", f"{LINK}::wait"
_OF_GROUP = " of "
SHARED = "shared"
OWN_TRANSFERS = f"(?:{LINK}|{SHARED})"
"""A regular expression for the names before the colons in annotations of transfers of this package."""
_OWN_TRANSFER = re.compile(f"{OWN_TRANSFERS}:(?!:)")

STEP_PARTS = GRADIENTS, OPTIMIZER = "gradients", "optimizer"
"""The parts of a step after the pipeline: wait for the sums of gradients over replicas; update the weights."""

SUM_GRADIENTS, GATHER_WEIGHTS = "sum gradients", "gather weights"

PREPARE, WAIT_FOR, STEP = "prepare ", "wait for ", "step "  # prefixes of a label or a number
SIZES_WAIT = f"{WAIT_FOR}sizes"
_KIND = re.compile(r"\(([FBIW])\)$")


def label(name: str, kind: str) -> str:
    """The label of a segment: `label("attn", FORWARD)` is "attn(F)"."""
    return f"{name}({kind})"


def in_words(text: str) -> str:
    """A label in words, for errors: "mlp(B)" -> "mlp backward"."""
    words = {FORWARD: "forward", BACKWARD: "backward", "I": "backward", WEIGHTS: "weight gradients"}
    return _KIND.sub(lambda found: f" {words[found[1]]}", text)


def letter_of(text: str) -> str | None:
    """The letter of a segment's label: F for "attn(F)"; None for any other text."""
    return found[1] if (found := _KIND.search(text)) else None


def is_wait(text: str) -> bool:
    return text.startswith(WAIT_FOR)


def without_wait(text: str) -> str:
    """The label of a transfer, from its own label or that of a wait for it: "wait for dispatch(F)" -> "dispatch(F)"."""
    return text.removeprefix(WAIT_FOR)


def with_group(text: str, group: str) -> str:
    """The label of a transfer, or of a call that starts one, in a group of ranks. "": there is only one group."""
    return f"{text}{_OF_GROUP}{group}" if group else text


def without_group(text: str) -> tuple[str, str]:
    """The label of a transfer without its group, and the group: ("link:carry", "x") for "link:carry of x"."""
    name, _, group = text.partition(_OF_GROUP) if _OWN_TRANSFER.match(text) else (text, "", "")
    return name, group


def segment_name(text: str) -> str:
    """The name of a segment, from its label, or from that of its setup or of a wait for it: "mlp(B)" -> "mlp"."""
    return _KIND.sub("", without_wait(text).removeprefix(PREPARE))
