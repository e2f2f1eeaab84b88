"""The actions of a pipeline schedule.

Actions are frozen values: they compare, hash, print and parse. Their text form (stage, letter, micro-batch) is that of
`torch.distributed.pipelining`, so the two projects can read each other's schedules:

    0F3                        forward of micro-batch 3 on stage 0
    7B1  7I1  7W1              backward of micro-batch 1 on stage 7: full, input gradient only, weight gradient only
    (0F5;7B1)OVERLAP_F_B       a forward and a backward that overlap: each hides the communication of the other
    2SEND_F3  3RECV_F3         stage 2 sends the output of micro-batch 3, stage 3 receives it as its input
    3SEND_B3  2RECV_B3         stage 3 sends the gradient of its input, stage 2 receives it
"""

import re
from dataclasses import dataclass
from enum import Enum

from ..messages import quoted


class Part(Enum):
    """The part of a backward that an action computes. `INPUT` and then `WEIGHT` equal one `FULL`."""

    FULL = "B"
    INPUT = "I"
    WEIGHT = "W"


class Flow(Enum):
    """What a transfer carries: activations (forward) or their gradients (backward)."""

    ACTIVATION = "F"
    GRADIENT = "B"


@dataclass(frozen=True, slots=True)
class Forward:
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}F{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Backward:
    stage: int
    micro_batch: int
    part: Part = Part.FULL

    def __str__(self) -> str:
        return f"{self.stage}{self.part.value}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a full backward that run as a pair. They differ in stage or micro-batch."""

    forward: Forward
    backward: Backward

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


@dataclass(frozen=True, slots=True)
class Send:
    """`stage` sends its output (ACTIVATION) to stage + 1, or its input's gradient (GRADIENT) to stage - 1."""

    stage: int
    micro_batch: int
    flow: Flow

    def __str__(self) -> str:
        return f"{self.stage}SEND_{self.flow.value}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Recv:
    """`stage` receives its input (ACTIVATION) from stage - 1, or its output's gradient (GRADIENT) from stage + 1."""

    stage: int
    micro_batch: int
    flow: Flow

    def __str__(self) -> str:
        return f"{self.stage}RECV_{self.flow.value}{self.micro_batch}"


Action = Forward | Backward | Overlap
Transfer = Send | Recv
Step = Action | Transfer

_SINGLE = re.compile(r"([0-9]{1,9})(SEND_F|SEND_B|RECV_F|RECV_B|F|B|I|W)([0-9]{1,9})")
_OVERLAP = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def parse(text: str) -> Step:
    """Read one action or transfer from its text form, as `str` writes it. Raises ValueError for any other text."""
    text = text.strip()
    if pair := _OVERLAP.fullmatch(text):
        match parse(pair[1]), parse(pair[2]):
            case Forward() as forward, Backward(part=Part.FULL) as backward:
                return Overlap(forward, backward)
        raise ValueError(
            f"an overlap pairs a forward and a full backward, as in (0F5;7B1)OVERLAP_F_B: got {quoted(text, 60)}"
        )
    if single := _SINGLE.fullmatch(text):
        stage, letter, micro_batch = int(single[1]), single[2], int(single[3])
        if letter == "F":
            return Forward(stage, micro_batch)
        if letter in "BIW":
            return Backward(stage, micro_batch, Part(letter))
        kind = Send if letter.startswith("SEND") else Recv
        return kind(stage, micro_batch, Flow(letter[-1]))
    raise ValueError(
        f"not an action: {quoted(text, 60)}; expected forms such as 0F3, 7B1, 7I1, 7W1, (0F5;7B1)OVERLAP_F_B"
    )


def members(action: Action) -> tuple[Forward | Backward, ...]:
    """Return (forward, backward) for an overlapped pair, and (action,) for any other action."""
    return (action.forward, action.backward) if isinstance(action, Overlap) else (action,)
