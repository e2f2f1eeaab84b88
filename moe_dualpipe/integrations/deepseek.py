"""The interface of DeepSeek's package (github.com/deepseek-ai/DualPipe): change the import and keep the program.

    from moe_dualpipe.deepseek import DualPipe, DualPipeV, set_p2p_tensor_shapes, set_p2p_tensor_dtype
    from moe_dualpipe.deepseek import WeightGradStore, run_backward

Actions run in the same order, losses and outputs are returned on the same ranks, and `overlapped_forward_backward` of
your module class gets the same arguments. New: CPU tensors (gloo), transfers that overlap with computation, and errors
that say what to change. The globals for shapes, dtype and the store belong to DeepSeek's interface; only this module
reads them.
"""

import queue
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels.weight_grads import WeightGrads
from ..runtime import P2P, Executor, OverlappedModule, TensorSpec
from ..schedule import Schedule, build, placement_of

__all__ = ["DualPipe", "DualPipeV", "WeightGradStore", "run_backward", "set_p2p_tensor_dtype", "set_p2p_tensor_shapes"]

TENSOR_SHAPES: list[tuple[int, ...]] | None = None
TENSOR_DTYPE: torch.dtype | None = None


def set_p2p_tensor_shapes(shapes: list[tuple[int, ...]]) -> None:
    """Set the shapes of the tensors sent between stages, one per output of a stage, for one micro-batch."""
    global TENSOR_SHAPES
    if not all(isinstance(shape, Sequence) for shape in shapes):
        raise ValueError(f"set_p2p_tensor_shapes takes a list of shapes, one per tensor: got {shapes}")
    TENSOR_SHAPES = shapes


def set_p2p_tensor_dtype(dtype: torch.dtype) -> None:
    """Set the dtype of the tensors sent between stages."""
    global TENSOR_DTYPE
    TENSOR_DTYPE = dtype


def run_backward(tensors: Sequence[Tensor], grad_tensors: Sequence[Tensor]) -> None:
    """Accumulate gradients from `tensors`, as `torch.autograd.backward` does."""
    torch.autograd.backward(tensors, grad_tensors)


class WeightGradStore:
    """Deferred weight gradients: while `enabled`, a layer's backward may `put` a function that computes one later."""

    enabled: ClassVar[bool] = False
    cache: ClassVar[list[Callable[[], None]]] = []
    funcs_queue: ClassVar["queue.Queue[list[Callable[[], None]]]"] = queue.Queue()

    @classmethod
    def put(cls, func: Callable[[], None]) -> None:
        cls.cache.append(func)

    @classmethod
    def flush(cls) -> None:
        """End the current chunk: one `pop` runs all functions put since the last flush."""
        cls.funcs_queue.put(cls.cache)
        cls.cache = []

    @classmethod
    def pop(cls) -> None:
        """Run the functions of the oldest chunk."""
        if cls.funcs_queue.empty():
            raise RuntimeError("WeightGradStore.pop() on an empty queue")
        for func in cls.funcs_queue.get():
            func()

    @classmethod
    def clear(cls) -> None:
        cls.cache = []
        cls.funcs_queue = queue.Queue()


class _StoreBacked(WeightGrads):
    """Defers weight gradients of layers with a `weight_grads` attribute and of layers that use the global store.

    The store runs its chunks in the order in which they were put. Both schedules run their W actions in the same order,
    so the chunk of a key is always the oldest one in the store.
    """

    @contextmanager
    def defer_to(self, key: Hashable) -> Iterator[None]:
        with super().defer_to(key):
            WeightGradStore.enabled = True
            try:
                yield
            finally:
                WeightGradStore.enabled = False
        WeightGradStore.flush()

    def run_deferred(self, key: Hashable) -> None:
        super().run_deferred(key)
        WeightGradStore.pop()

    def clear(self) -> None:
        super().clear()
        WeightGradStore.clear()


class _Pipe(nn.Module):
    """The common part of DualPipe and DualPipeV."""

    schedule_name: ClassVar[str]

    def __init__(
        self, modules: tuple[nn.Module, nn.Module] | nn.Sequential, batch_dim: int = 0,
        process_group: dist.ProcessGroup | None = None, rank_mapping: list[int] | None = None,
    ) -> None:  # fmt: skip
        """modules: this rank's two stages. batch_dim: the dimension that is divided into micro-batches.

        process_group: the ranks of the pipeline (default: all). rank_mapping: pipeline rank of each rank of that group.
        Raises ValueError for a wrong number of modules or ranks, or a mapping that is not a permutation.
        """
        super().__init__()
        if len(modules) != 2:
            raise ValueError(f"{type(self).__name__} needs two modules on every rank: got {len(modules)}")
        self.module = nn.ModuleList(modules)
        same_class = type(self.module[0]) is type(self.module[1])
        self.overlapped_forward_backward = same_class and isinstance(self.module[0], OverlappedModule)
        self.batch_dim = batch_dim
        self.group = process_group or dist.group.WORLD
        if self.group is None:
            raise RuntimeError("call torch.distributed.init_process_group() first")
        self.num_ranks = self.group.size()
        self._placement = placement_of(self.schedule_name, self.num_ranks)
        tensor = next(iter([*self.parameters(), *self.buffers()]), torch.empty(0))
        self._p2p = P2P.connect(self.group, (), tensor.device, rank_mapping)
        self._weight_grads = _StoreBacked()
        self.rank = self._p2p.rank
        self.is_first_rank, self.is_last_rank = self.rank == 0, self.rank == self.num_ranks - 1
        # Neighbors in the pipeline, as ranks of the group; None at the ends of the pipeline.
        order = list(range(self.num_ranks)) if rank_mapping is None else list(rank_mapping)
        self.first_rank, self.last_rank = order.index(0), order.index(self.num_ranks - 1)
        self.prev_rank = None if self.is_first_rank else order.index(self.rank - 1)
        self.next_rank = None if self.is_last_rank else order.index(self.rank + 1)

    def step(
        self, *inputs: Tensor | None, num_chunks: int = 0, criterion: Callable[..., Tensor] | None = None,
        labels: Sequence[Tensor | None] | Tensor | None = (), return_outputs: bool = False,
    ) -> tuple[Tensor | None, Tensor | tuple[Tensor | None, ...] | None]:  # fmt: skip
        """Run a training step; under `torch.no_grad()`, an inference step.

        inputs: the inputs of the first stage, on the ranks that hold it. num_chunks: the number of micro-batches.
        criterion: `criterion(*outputs, *labels)` returns the loss. labels: on the ranks that hold the last stage.
        return_outputs: also return the outputs of the last stage.

        Returns (loss, outputs). loss: the losses of the micro-batches that end on this rank, stacked. outputs: their
        outputs, concatenated (a tuple if the stage has several). None on other ranks, and without `return_outputs`.
        Raises ValueError if the schedule does not fit `num_chunks`, or an input, the criterion or a shape is missing.
        """
        if TENSOR_SHAPES is None or TENSOR_DTYPE is None:
            raise ValueError("call set_p2p_tensor_shapes and set_p2p_tensor_dtype before step()")
        WeightGradStore.clear()
        self.forward_only, self.return_outputs = not torch.is_grad_enabled(), return_outputs
        specs = [TensorSpec(tuple(shape), TENSOR_DTYPE) for shape in TENSOR_SHAPES]
        schedule = build(self.schedule_name, self.num_ranks, num_chunks)
        entering, ending = self._own_micro_batches(schedule)
        # On all ranks, module[0] is the stage of the flow that starts on rank 0, as in DeepSeek's package.
        modules = dict(zip(self._placement.stages[self.rank], self.module, strict=True))
        p2p = self._p2p.with_specs(specs)
        executor = Executor(modules, p2p, self._weight_grads, overlap=self.overlapped_forward_backward)
        inputs_of = self._scatter(inputs, entering)
        labels_of = self._scatter((labels,) if isinstance(labels, Tensor) else labels or (), ending)
        result = executor.step(schedule, inputs_of, labels_of, criterion, return_outputs)
        loss = torch.stack([result.losses[m] for m in ending]) if result.losses else None
        outputs = None
        if return_outputs and ending:
            columns = zip(*(result.outputs[m] for m in ending), strict=True)
            gathered = tuple(None if c[0] is None else torch.cat(c, dim=self.batch_dim) for c in columns)
            outputs = gathered[0] if len(gathered) == 1 else gathered
        return loss, outputs

    def _scatter(self, tensors: Sequence[Tensor | None], micro_batches: list[int]) -> Mapping[int, tuple]:
        """Divide each tensor into one piece for each micro-batch. If a tensor is None, so are its pieces."""
        count = len(micro_batches)
        pieces = []
        for t in tensors if micro_batches else ():
            if t is not None and (size := t.shape[self.batch_dim]) % count and (self.num_ranks > 1 or size < count):
                raise ValueError(f"a batch of {size} cannot be divided evenly into {count} micro-batches")
            pieces.append([None] * count if t is None else t.tensor_split(count, dim=self.batch_dim))
        return {m: tuple(piece[i] for piece in pieces) for i, m in enumerate(micro_batches)}

    def _own_micro_batches(self, schedule: Schedule) -> tuple[list[int], list[int]]:
        """The micro-batches that enter the pipeline on this rank, and those that end on it."""
        micro_batches = range(schedule.num_micro_batches)
        ends = (0, schedule.num_stages - 1)
        entering, ending = ([m for m in micro_batches if schedule.rank_of(end, m) == self.rank] for end in ends)
        return entering, ending


class DualPipe(_Pipe):
    """DualPipe: rank r of R holds stage r for one flow and stage R-1-r for the other.

    The numbers of ranks and of micro-batches must be even. Pass inputs and labels on the first and the last rank. The
    loss on the first rank belongs to the inputs of the last rank, and vice versa. Each stage is on two ranks: sum their
    gradients before the optimizer step.
    """

    schedule_name = "dualpipe"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        half = self.num_ranks // 2
        self.is_in_second_half = self.rank >= half
        self.is_middle_rank = self.rank in (half - 1, half)


class DualPipeV(_Pipe):
    """DualPipeV: rank r of R holds stages r and 2R-1-r. Inputs, labels and losses are on rank 0."""

    schedule_name = "dualpipev"
