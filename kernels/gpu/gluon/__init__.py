"""Warp-specialized kernels for Hopper (sm_90) in Gluon, Triton's lower-level language: the products of experts.

They are launched by the same functions as the Triton kernels, for configurations with `engine="gluon"`. Only then are
the modules of this package imported: Gluon is experimental, and Triton may move it.
"""

from ..configs import TileConfig

_COOPERATIVE = TileConfig(128, 256, 64, warps=8, stages=4, tma=True, per_sm=1, engine="gluon")
_PING_PONG = TileConfig(128, 128, 64, warps=4, stages=5, tma=True, per_sm=1, engine="gluon")
# Four stages leave shared memory for z.
_PING_PONG_Z = TileConfig(128, 128, 64, warps=4, stages=4, tma=True, per_sm=1, engine="gluon")
CONFIGS = {
    "up": _COOPERATIVE, "down": _PING_PONG, "down_backward": _PING_PONG_Z, "up_backward": _PING_PONG,
    "wgrad": _COOPERATIVE,
}  # fmt: skip
"""The configuration of each kernel. Its tiles fill the registers and the shared memory of a multiprocessor."""
