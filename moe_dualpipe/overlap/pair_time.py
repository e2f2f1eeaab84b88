"""The time of an overlapped pair: a forward and a backward of two micro-batches, in the order of the overlap engine.

A GPU computes on one stream and transfers on another. Both run their work in the order in which the engine queues it
(overlap/engine.py), layer by layer:

    compute    attn(F) mlp(B) mlp(W) mlp(F) attn(B) attn(W)
    transfer   dispatch(F) dispatch(B) combine(F) combine(B)

The combine of a backward brings gradients to the experts before mlp(B), so it belongs to the layer before. Transfers
occupy some multiprocessors: computation beside them is slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """The segments of a layer for one micro-batch, in seconds. B: gradients of inputs. W: gradients of weights.

    recompute: what the backward computes again, already part of attn_b and mlp_b. combine_b and dispatch_b are the
    transfers of the backward, in the order in which it runs them. All transfers of a dense layer are 0. host: what the
    CPU needs to launch the forward; a backward needs twice as much.
    """

    attn_f: float
    mlp_f: float
    attn_b: float
    mlp_b: float
    attn_w: float
    mlp_w: float
    dispatch_f: float = 0.0
    combine_f: float = 0.0
    combine_b: float = 0.0
    dispatch_b: float = 0.0
    host: float = 0.0

    @property
    def compute_f(self) -> float:
        return self.attn_f + self.mlp_f

    @property
    def compute_b(self) -> float:
        """Both gradients."""
        return self.attn_b + self.mlp_b + self.weights

    @property
    def seconds(self) -> float:
        """Forward and backward, with nothing hidden."""
        return self.compute_f + self.compute_b + self.transfer_f + self.transfer_b

    @property
    def weights(self) -> float:
        return self.attn_w + self.mlp_w

    @property
    def transfer_f(self) -> float:
        return self.dispatch_f + self.combine_f

    @property
    def transfer_b(self) -> float:
        return self.dispatch_b + self.combine_b


NO_LAYER = LayerSeconds(0, 0, 0, 0, 0, 0)


def pair_seconds(
    forward: Sequence[LayerSeconds], backward: Sequence[LayerSeconds], slower: float = 0.0, late: bool = False
) -> float:  # fmt: skip
    """Seconds of an overlapped pair of chunks. Layers are given in the order of the model; backward runs them reversed.

    late: mlp(W) after mlp(F), as with `WeightGrads.late`. slower: the share of the device that transfers occupy;
    computation that runs beside them takes as much longer.

    Example: one layer each, and everything takes 1: the 6 computations take 6 and hide all 4 transfers.
    """
    free = {"compute": 0.0, "transfer": 0.0}

    def run(stream: str, seconds: float, after: float) -> float:
        """The end of what a stream does once its input is there."""
        if stream == "transfer" and not seconds:
            return after
        free[stream] = max(free[stream], after) + seconds
        return free[stream]

    n = max(len(forward), len(backward), 1)  # 1: a stage may have no layers
    f = [*forward, *[NO_LAYER] * (n - len(forward))]
    b = [*reversed(backward), *[NO_LAYER] * (n - len(backward) + 1)]
    into_f, into_b = 0.0, run("transfer", b[0].combine_b, 0.0)
    for one, other, after in zip(f, b, b[1:], strict=False):
        attn_f = run("compute", one.attn_f, into_f)
        mlp_b = run("compute", other.mlp_b, into_b)
        dispatched_f = run("transfer", one.dispatch_f, attn_f)
        dispatched_b = run("transfer", other.dispatch_b, mlp_b)
        if not late:
            run("compute", other.mlp_w, mlp_b)
        mlp_f = run("compute", one.mlp_f, dispatched_f)
        if late:
            run("compute", other.mlp_w, mlp_b)
        attn_b = run("compute", other.attn_b, dispatched_b)
        run("compute", other.attn_w, attn_b)
        into_f = run("transfer", one.combine_f, mlp_f)
        into_b = run("transfer", after.combine_b, attn_b)
    end = max(free["compute"], into_f, into_b)
    compute = sum(layer.compute_f for layer in forward) + sum(layer.compute_b for layer in backward)
    transfers = sum(layer.transfer_f for layer in forward) + sum(layer.transfer_b for layer in backward)
    hidden = max(0.0, compute + transfers - end)
    return min(compute + transfers, end + hidden * slower)
