"""A cause of lost time in a trace, with its evidence, and what to change."""

from collections.abc import Mapping
from dataclasses import dataclass

_SMALLER = "Launch fewer and larger kernels: fused kernels, torch.compile, CUDA graphs, or larger micro-batches."
_READ_LATER = "Leave the number on the device, read it later, or copy it into pinned memory without blocking."

CAUSES: Mapping[str, tuple[str, str]] = {
    "host-bound": ("The host launches work too late, and the device waits for it.", _SMALLER),
    "host-sync": ("The host waits for the device (.item(), .cpu()), so the queue is empty afterwards.", _READ_LATER),
    "host-sync/thread": (
        "Segments wait for transfers that they have just started.",
        "Wait where the result is needed, and read numbers (.item()) after the step."),
    "allocator": (
        "The device waits while the host allocates or releases memory.",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and call empty_cache() outside of steps only."),
    "data-loader": (
        "The device waits for the next batch.",
        "Use more workers (num_workers, prefetch_factor, persistent_workers), or prepare the data before training."),
    "checkpoint": (
        "The device waits while a checkpoint is saved.",
        "Save asynchronously (torch.distributed.checkpoint.async_save), or less often."),
    "slow-optimizer": (
        "The optimizer launches many small kernels, and the device waits for them.",
        "Use the fused optimizer (fused=True), or foreach=True."),
    "short-kernels": ("The device takes time between kernels that are queued, and the kernels are short.", _SMALLER),
    "copies": (
        "Nothing is computed while data is copied.",
        "Copy from pinned memory (pin_memory=True, non_blocking=True) on a stream of its own, one batch ahead."),
    "memsets": (
        "Nothing is computed while memory is filled.",
        "Fill less: zero_grad(set_to_none=True), torch.empty instead of torch.zeros."),
    "few-queues": (
        "Streams wait for each other without a dependency: they share a hardware queue.",
        "Unset CUDA_DEVICE_MAX_CONNECTIONS or raise it (the default is 8), or use fewer streams."),
    "late-launch": (
        "Transfers are launched late, although their input is ready.",
        "Launch each transfer directly after the computation that produces its input."),
    "early-wait": (
        "Computation waits for transfers that it does not need.",
        "Wait for each transfer directly before the computation that needs it."),
    "imbalance": (
        "Transfers wait for a slower rank.",
        "Find out why it is late: more tokens, more work, a slower device, or a slower host."),
    "imbalance/moving": (
        "Transfers wait for a slower rank, and each time it is another one.",
        "Balance the work of each step: tokens per expert, lengths of sequences. No device is slower than the others."),
    "slow-transfer": (
        "Some transfers are slower than others of the same size.",
        "Look for a slow link, or for other traffic on it at the same time."),
    "imbalance/one rank": (
        "Some transfers take much longer than others of the same size.",
        "Other ranks joined late, or the link was slow: analyze the traces of all ranks together to tell which."),
    "small-messages": (
        "Many small transfers follow one another, and each takes as long as its latency.",
        "Group them: one transfer of a flat buffer, larger buckets, or coalesced calls."),
    "starved-transfer": (
        "Transfers are slower beside computation than alone.",
        "Give communication more SMs, or a higher stream priority."),
    "starved-transfer/copy engines": (
        "Transfers on copy engines are slower beside computation than alone.",
        "Send less: copies and kernels share the bandwidth of memory."),
    "starved-computation": (
        "Kernels are slower beside communication than alone.",
        "Use fewer SMs for communication (NCCL_MAX_CTAS, or the number of SMs of DeepEP), or copy engines."),
    "starved-computation/copy engines": (
        "Kernels are slower beside transfers on copy engines than alone.",
        "Send less: copies and kernels share the bandwidth of memory."),
    "exposed-pipeline": (
        "Computation waits for sends and receives of the pipeline.",
        "Post receives one micro-batch ahead, do not wait for sends, or use more micro-batches."),
    "sum-at-end": (
        "Gradients are summed after the backward, with nothing beside it.",
        "Sum them in buckets beside the backward: DistributedDataParallel, or a hook for each parameter."),
    "sum-at-end/last bucket": (
        "Nothing is computed beside the last sum of gradients.",
        "Make the last bucket smaller (DistributedDataParallel: bucket_cap_mb), or send it in bfloat16."),
    "exposed-weights": (
        "Computation waits for weights or gradients that are gathered or scattered.",
        "Prefetch the next layer's weights (FSDP: forward_prefetch, backward_prefetch), or shard over fewer ranks."),
    "nothing-to-overlap/experts": (
        "No independent computation can run beside the transfers of experts.",
        "Interleave a second micro-batch (DualPipe, two-batch overlap), or send less."),
    "nothing-to-overlap/interleaved": (
        "The computation beside the transfers of experts is too short.",
        "Move work beside them, such as weight gradients or shared experts, send less, or use a faster link."),
    "nothing-to-overlap": (
        "No independent computation can run beside the transfers.",
        "Send less, or start the transfers in parts, each as soon as its input is ready."),
}  # fmt: skip
"""The title and the remedy of each kind of verdict, and of its variants after a slash."""
KINDS = tuple(dict.fromkeys(key.partition("/")[0] for key in CAUSES))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cause on one device. Texts may hold names from the trace: escape them. Times are in microseconds."""

    kind: str
    """One of KINDS."""
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
