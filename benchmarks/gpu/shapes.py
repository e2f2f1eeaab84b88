"""The layer shapes that the GPU suite measures, and formulas for the FLOPs and bytes of each.

FLOPs count the three matrices of SwiGLU, two FLOPs per multiply-add. Backward counts twice forward (input and weight
gradients). The router, the activation and recomputation are not counted.
Bytes count each input and each output once.

T tokens, D model dim, F expert hidden size, E experts, K experts per token.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one Mixture-of-Experts layer. `note` says where they come from.

    Example: Shape(32768, 4096, 512, 128, 8) has 262,144 rows, 3.30 TFLOP forward, 6.60 TFLOP backward, and saves
    24,576 bytes per token for backward in bf16.
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
        """Rows in expert-major order: K per token."""
        return self.T * self.K

    @property
    def forward_flops(self) -> int:
        return 6 * self.rows * self.D * self.F

    @property
    def backward_flops(self) -> int:
        return 12 * self.rows * self.D * self.F

    def saved_bytes(self, element: int = 2) -> int:
        """Bytes per token that must be saved for backward: x, and z = [gate; up] of each choice. 2D + 4KF in bf16."""
        return element * (self.D + 2 * self.K * self.F)

    def permute_bytes(self, element: int = 2) -> int:
        """Bytes of permute: tokens read once, rows written once, and one int32 index per row."""
        return element * self.D * (self.T + self.rows) + 4 * self.rows

    def unpermute_bytes(self, element: int = 2) -> int:
        """Bytes of unpermute: rows read once, tokens written once; an int32 position and fp32 weight per choice."""
        return element * self.D * (self.rows + self.T) + (4 + 4) * self.rows


MAIN_SHAPE = Shape(32768, 4096, 512, 128, 8, "the main shape")

# Most informative first: when time runs out, the last ones are skipped.
SHAPES = (
    MAIN_SHAPE,
    Shape(32768, 2048, 768, 128, 8, "Qwen3-30B-A3B"),
    Shape(24576, 1536, 256, 128, 8),
    Shape(32768, 4096, 1024, 128, 8),
    Shape(40960, 768, 256, 128, 8),
    Shape(32768, 4096, 256, 256, 16),
    Shape(32768, 4096, 2048, 64, 4),
    Shape(16384, 7168, 2048, 32, 8, "DeepSeek-V3, an eighth of its 256 experts: one of eight expert-parallel ranks"),
)

# Small enough for Triton's interpreter on a CPU; T is not a multiple of any tile.
SMOKE_SHAPES = (Shape(40, 32, 16, 4, 2, "smoke"),)
