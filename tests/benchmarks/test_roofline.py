"""FLOPs and bytes of the roofline model, against numbers computed by hand."""

from benchmarks.gpu import roofline
from benchmarks.gpu.shapes import Shape


def test_flops_and_bytes_of_each_launch_computed_by_hand():
    """T=2, D=3, F=5, E=7, K=4: M=8 rows; [8, 3] x [3, 5] takes 240 FLOPs."""
    launches = roofline.launches_of(Shape(2, 3, 5, 7, 4))
    forward = {k.name: (k.flops, k.bytes) for k in launches["forward"]}
    assert forward == {
        "up": (480, 2 * (2 * 3 + 7 * 10 * 3 + 8 * 10 + 8 * 5)),  # x, weights, z, h
        "down": (240, 2 * (8 * 5 + 7 * 3 * 5 + 8 * 3)),  # h, weights, outputs
        "sum": (0, 2 * (8 * 3 + 2 * 3)),
    }
    backward = {k.name: (k.flops, k.bytes) for k in launches["backward"]}
    assert backward["down_backward"] == (
        240,
        2 * (2 * 3 + 7 * 3 * 5 + 8 * 10 + 8 * 10 + 8 * 5),
    )  # dy, weights, z, dz, h
    assert backward["wgrad of gate_up"] == (480, 2 * (2 * 3 + 8 * 10) + 4 * 7 * 10 * 3)  # x, dz; fp32 gradients
    assert backward["wgrad of down"] == (240, 2 * (2 * 3 + 8 * 5) + 4 * 7 * 3 * 5)
