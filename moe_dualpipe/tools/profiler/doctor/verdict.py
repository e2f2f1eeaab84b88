"""The table of causes of lost time: a name, what happens, the evidence, and what to change.

The modules launching, order, transfers and slowdown find them in a trace. Each gives the numbers of its evidence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_SMALLER = "Launch fewer and larger kernels: fused kernels, torch.compile, CUDA graphs, or larger micro-batches."
_LESS_MEMORY = "Send less: copies and kernels share the bandwidth of memory."
_ACTIVITY = (
    "The host did this {times}, for {spent:,.0f} us in total.",
    "Meanwhile, the device had nothing to do for {cost:,.0f} us.",
)
_COPIES = ("Nothing was computed for {cost:,.0f} us during {count:,} of them: {size:,} bytes.",)
_WAITS_FOR_RANKS = (
    "This rank waited {cost:,.0f} us in {count:,} transfers until the last rank joined, {most:,.0f} us at most.",
    "{ranks}.",
)
_LONG = (
    "{count:,} of {transfers:,} transfers take {ratio:.1f} times as long (median) as the fastest quarter of the same "
    "kind and size: {cost:,.0f} us more in total.",
    "The longest takes {longest:,.0f} us instead of {usual:,.0f}.",
)
_STARVED_TRANSFER, _STARVED_COMPUTATION = (
    (f"{slow.capitalize()} take {{ratio:.2f}} times as long beside {beside} as alone, as measured on {{measured:,}} "
     f"{slow} of {{kinds}} that ran both ways.",
     f"In total, this adds {{cost:,.0f}} us to the {slow} beside {beside}.")
    for slow, beside in (("transfers", "computation"), ("kernels", "communication"))
)  # fmt: skip
_EXPOSED = (
    "The next computation starts as soon as {transfers} ended: {cost:,.0f} us.",
    "The longest wait is for {place}.{behind}",
    "No computation was queued that does not depend on these transfers.",
)


class Cause(NamedTuple):
    """A row of the table. The evidence has fields in braces, of which `count`, `cost` and `most` are always known: the
    number of occurrences, what they cost together, and the most that one costs."""

    title: str
    remedy: str
    evidence: tuple[str, ...]


CAUSES: Mapping[str, Cause] = {
    "host-bound": Cause(
        "The host launches work too late, and the device waits for it.", _SMALLER,
        ("{late:,} of {count:,} kernels and copies were launched when their stream was already idle. Nothing was "
         "computed for {cost:,.0f} us until they were launched.",
         "A kernel starts {latency:,.1f} us or more after its launch.")),
    "host-bound/thread": Cause(
        "The thread neither computes nor waits for a transfer.",
        "Do more in each operator (larger micro-batches, torch.compile), and give each process its own cores.",
        ("In {count:,} gaps, Python ran between operators, or the system ran something else: {cost:,.0f} us in total, "
         "{most:,.0f} us at most.",)),
    "host-sync": Cause(
        "The host waits for the device (.item(), .cpu()), so the queue is empty afterwards.",
        "Leave the number on the device, read it later, or copy it into pinned memory without blocking.",
        ("{call} and similar calls waited {count:,} times, {waited:,.0f} us in total.",
         "After {emptied:,} of these waits, nothing was computed until the next launch took effect: {cost:,.0f} us in "
         "total, {most:,.0f} us at most.")),
    "host-sync/thread": Cause(
        "Segments wait for transfers that they have just started.",
        "Wait where the result is needed, and read numbers (.item()) after the step.",
        ("In {cases}, a segment waited for a transfer that it had just started: {waited:,.0f} us in total.",
         "Nothing was computed for {cost:,.0f} us of that, for {most:,.0f} us at most in one wait.")),
    "allocator": Cause(
        "The device waits while the host allocates or releases memory.",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and call empty_cache() outside of steps only.",
        _ACTIVITY),
    "data-loader": Cause(
        "The device waits for the next batch.",
        "Use more workers (num_workers, prefetch_factor, persistent_workers), or prepare the data before training.",
        _ACTIVITY),
    "checkpoint": Cause(
        "The device waits while a checkpoint is saved.",
        "Save asynchronously (torch.distributed.checkpoint.async_save), or less often.", _ACTIVITY),
    "slow-optimizer": Cause(
        "The optimizer launches many small kernels, and the device waits for them.",
        "Use the fused optimizer (fused=True), or foreach=True.", _ACTIVITY),
    "short-kernels": Cause(
        "The device takes time between kernels that are queued, and the kernels are short.", _SMALLER,
        ("{count:,} gaps of {gap:,.1f} us (median), between kernels of {kernel:,.1f} us.",)),
    "copies": Cause(
        "Nothing is computed while data is copied.",
        "Copy from pinned memory (pin_memory=True, non_blocking=True) on a stream of its own, one batch ahead.",
        _COPIES),
    "memsets": Cause(
        "Nothing is computed while memory is filled.",
        "Fill less: zero_grad(set_to_none=True), torch.empty instead of torch.zeros.", _COPIES),
    "few-queues": Cause(
        "Streams wait for each other without a dependency: they share a hardware queue.",
        "Unset CUDA_DEVICE_MAX_CONNECTIONS or raise it (the default is 8), or use fewer streams.",
        ("{count:,} kernels were ready, but waited until unrelated work on another stream ended: {cost:,.0f} us in "
         "total.",
         "They had been launched, their streams were free, and their input was ready. All work of these streams "
         "started in the order in which it was launched.{setting}")),
    "late-launch": Cause(
        "Transfers are launched late, although their input is ready.",
        "Launch each transfer directly after the computation that produces its input.",
        ("The input of {count:,} transfers was ready, but they started later: {cost:,.0f} us in total, {most:,.0f} us "
         "at most ({place}).",
         "Until then, work ran that was launched earlier and that they do not need.{behind}")),
    "early-wait": Cause(
        "Computation waits for transfers that it does not need.",
        "Wait for each transfer directly before the computation that needs it.",
        ("{count:,} times, computation waited for a transfer of the other micro-batch: {cost:,.0f} us in total, "
         "{most:,.0f} us at most.",)),
    "imbalance": Cause(
        "Transfers wait for a slower rank.",
        "Find out why it is late: more work, a slower device, or a slower host.", _WAITS_FOR_RANKS),
    "imbalance/moving": Cause(
        "Transfers wait for a slower rank, and each time it is another one.",
        "Balance the work of the ranks in each step. No device is slower than the others.",
        _WAITS_FOR_RANKS),
    "slow-transfer": Cause(
        "Some transfers are slower than others of the same size.",
        "Look for a slow link, or for other traffic on it at the same time.",
        (*_LONG, "Waits for late ranks are not counted.")),
    "imbalance/one rank": Cause(
        "Some transfers take much longer than others of the same size.",
        "Other ranks joined late, or the link was slow. Traces of all ranks tell which, if they record its group.",
        _LONG),
    "small-messages": Cause(
        "Many small transfers follow one another, and each takes as long as its latency.",
        "Group them: one transfer of a flat buffer, larger buckets, or coalesced calls.",
        ("{count:,} transfers follow another small one of the same kind. Each takes {each:,.1f} us (median), "
         "{together:,.0f} us in total.",)),
    "starved-transfer": Cause(
        "Transfers are slower beside computation than alone.",
        "Give communication more SMs, or a higher stream priority.", _STARVED_TRANSFER),
    "starved-transfer/copy engines": Cause(
        "Transfers on copy engines are slower beside computation than alone.", _LESS_MEMORY, _STARVED_TRANSFER),
    "starved-computation": Cause(
        "Kernels are slower beside communication than alone.",
        "Use fewer SMs for communication (NCCL_MAX_CTAS, or the number of SMs of DeepEP), or copy engines.",
        _STARVED_COMPUTATION),
    "starved-computation/copy engines": Cause(
        "Kernels are slower beside transfers on copy engines than alone.", _LESS_MEMORY, _STARVED_COMPUTATION),
    "exposed-pipeline": Cause(
        "Computation waits for sends and receives of the pipeline.",
        "Post receives one micro-batch ahead, do not wait for sends, or use more micro-batches.",
        ("During {count:,} sends and receives, nothing was computed for {cost:,.0f} us.",
         "The longest wait is {most:,.0f} us.")),
    "sum-at-end": Cause(
        "Gradients are summed after the backward, with nothing beside it.",
        "Sum them in buckets beside the backward: DistributedDataParallel, or a hook for each parameter.", _EXPOSED),
    "sum-at-end/last bucket": Cause(
        "Nothing is computed beside the last sum of gradients.",
        "Make the last bucket smaller (DistributedDataParallel: bucket_cap_mb), or send it in bfloat16.", _EXPOSED),
    "exposed-weights": Cause(
        "Computation waits for weights or gradients that are gathered or scattered.",
        "Prefetch the next layer's weights (FSDP: forward_prefetch, backward_prefetch), or shard over fewer ranks.",
        _EXPOSED),
    "nothing-to-overlap/one chunk": Cause(
        "No independent computation can run beside the transfers of a micro-batch.",
        "Interleave a second micro-batch (DualPipe, two-batch overlap), or send less.", _EXPOSED),
    "nothing-to-overlap/interleaved": Cause(
        "The computation beside the transfers of a micro-batch is too short.",
        "Move work beside them that does not need them, send less, or use a faster link.",
        _EXPOSED),
    "nothing-to-overlap": Cause(
        "No independent computation can run beside the transfers.",
        "Send less, or start the transfers in parts, each as soon as its input is ready.", _EXPOSED),
}  # fmt: skip
"""The causes by kind, and their variants after a slash."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cause on one device. Texts may hold names from the trace: escape them. Times are in microseconds."""

    kind: str
    """A key of CAUSES, without its variant."""
    title: str
    """A sentence: what happens."""
    evidence: tuple[str, ...]
    """Sentences with the numbers that show it."""
    remedy: str
    """A sentence: what to change."""
    place: str
    """The phase, module or kernel where it costs most."""
    start_us: float
    """The worst occurrence, from the start of the device's first event."""
    end_us: float
    cost_us: float
    """Time of the window that shows the cause."""
    gain_us: float | None = None
    """How much shorter the window would be without it, by a replay of the recorded dependencies. None: unknown."""
    gain_fraction: float | None = None
    """`gain_us` as a share of the window."""
    share: float = 0.0
    """The entries of the account that it explains, as a share of the window."""
