"""The sizes at which the GPU suite measures, and what must be computed and moved at each: formulas, nothing measured.

A rate is only as honest as what is counted. Operations are those of the three matrices of SwiGLU, two for each
multiply-add, forward once and backward twice as many (input and weight gradients); the router, the activation and
whatever an implementation computes again do not count. Bytes are those that must move: each input once, each output
once.

T tokens, D model dim, F expert hidden size, E experts, K experts per token.
"""

from dataclasses import dataclass

INDEX_BYTES = 40  # for each choice: three int64 of the expert order, a routing weight, and as much again for tables


@dataclass(frozen=True, slots=True)
class Shape:
    """One Mixture-of-Experts layer. `note` says where it comes from.

    Example: Shape(32768, 4096, 512, 128, 8) has 262,144 rows, 3.30 TFLOP forward, 6.60 TFLOP backward, and keeps
    24,576 bytes a token in bf16.
    """

    T: int
    D: int
    F: int
    E: int
    K: int
    note: str = ""

    def __str__(self) -> str:
        return f"T={self.T} D={self.D} F={self.F} E={self.E} K={self.K}"

    @property
    def rows(self) -> int:
        """Rows in expert-major order: one for each choice."""
        return self.T * self.K

    @property
    def forward_flops(self) -> int:
        return 6 * self.rows * self.D * self.F

    @property
    def backward_flops(self) -> int:
        return 12 * self.rows * self.D * self.F

    def saved_bytes(self, element: int = 2) -> int:
        """Bytes a token that backward cannot do without: x and z = [gate; up] of each choice. 2D + 4KF in bf16."""
        return element * (self.D + 2 * self.K * self.F)

    def permute_bytes(self, element: int = 2) -> int:
        """Tokens read once, rows written once, and the row index (int64) of each."""
        return element * self.D * (self.T + self.rows) + 8 * self.rows

    def unpermute_bytes(self, element: int = 2) -> int:
        """Rows read once, tokens written once, and position (int64) and weight (fp32) of each choice."""
        return element * self.D * (self.rows + self.T) + (8 + 4) * self.rows


GOAL_SHAPE = Shape(32768, 4096, 512, 128, 8, "the goals are set here")

# Most telling first: where time runs out, the last ones are left out.
SHAPES = (
    GOAL_SHAPE,
    Shape(32768, 2048, 768, 128, 8, "Qwen3-30B-A3B"),
    Shape(24576, 1536, 256, 128, 8),
    Shape(32768, 4096, 1024, 128, 8),
    Shape(40960, 768, 256, 128, 8),
    Shape(32768, 4096, 256, 256, 16),
    Shape(32768, 4096, 2048, 64, 4),
    Shape(16384, 7168, 2048, 32, 8, "DeepSeek-V3, an eighth of its 256 experts: one of eight expert-parallel ranks"),
)
TRAINING_SHAPE = Shape(16384, 768, 512, 32, 4, "the preset `small`")

# Awkward on purpose; small enough for Triton's interpreter on a CPU.
SMOKE_SHAPES = (Shape(40, 32, 16, 4, 2, "smoke"),)
