"""Text generation with a key/value cache, in one process or through a pipeline."""

from .eval_mode import eval_mode
from .generation import generate, prefill, printable_text
from .pipeline import generate_through_pipeline
from .sampling import Sampling

__all__ = ["Sampling", "eval_mode", "generate", "generate_through_pipeline", "prefill", "printable_text"]
