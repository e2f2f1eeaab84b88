"""Text generation with a key/value cache, in one process or through a pipeline; the loss of given text."""

from .generation import ExpertRanks, eval_mode, generate, prefill, printable_text
from .pipelined import generate_through_pipeline
from .sampling import Sampling
from .scoring import stream_losses, token_losses

__all__ = [
    "ExpertRanks",
    "Sampling",
    "eval_mode",
    "generate",
    "generate_through_pipeline",
    "prefill",
    "printable_text",
    "stream_losses",
    "token_losses",
]  # fmt: skip
