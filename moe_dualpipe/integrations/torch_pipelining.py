"""DualPipeV in PyTorch's own pipeline runtime, for training loops that are built on it.

`torch.distributed.pipelining` has the schedule, but runs an overlapped pair as a forward and then a backward. It also
splits a backward into I and W between nodes of the autograd graph. A `Segmented` module is a single node, so its whole
backward would run in I. The runtime accepts functions that replace an action:

    stage = PipelineStage(module, index, num_stages, device, input_args=..., output_args=...)
    schedule = ScheduleDualPipeV(stages, num_micro_batches, loss_fn)
    register(schedule)

These functions keep the runtime's bookkeeping and change only the computation: a pair is one call of
`overlapped_forward_backward`, and I defers weight gradients to W. Pass `input_args` and `output_args` (floating-point
ones with requires_grad=True). Otherwise torch infers shapes by running a backward on uninitialized numbers, and the
first step starts with those weight gradients.

Limits: the functions use a few private names of torch; `loss_kwargs` of `step` do not reach the loss of an overlapped
forward; FSDP and DDP are not supported.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _Action, _PipelineContext
from torch.nn.parallel import DistributedDataParallel

from ..overlap import Segmented


def register(schedule: Any) -> None:
    """Register the functions below for `schedule`, whose stages must all be Segmented."""
    schedule.register_custom_function(schedules.OVERLAP_F_B, overlap_f_b)
    schedule.register_custom_function(schedules.BACKWARD_INPUT, backward_input)
    schedule.register_custom_function(schedules.BACKWARD_WEIGHT, backward_weight)


def overlap_f_b(action: _Action, ctx: _PipelineContext) -> None:
    """Run an OVERLAP_F_B as one call of the modules' `overlapped_forward_backward`.

    Raises TypeError for a module other than a plain `Segmented` and for keyword inputs; ValueError for an action other
    than a forward and a full backward, and for stages without `input_args` and `output_args`.
    """
    halves = action.sub_actions or ()
    if [half.computation_type for half in halves] != [schedules.FORWARD, schedules.FULL_BACKWARD]:
        raise ValueError(f"{action} needs two sub_actions, a forward and a full backward: got {action.sub_actions}")
    first, second = (_StageAction(half, ctx) for half in halves)
    if kwargs := ctx.kwarg_mbs[first.micro_batch] if ctx.kwarg_mbs else {}:
        raise TypeError(f"{type(first.module).__name__} takes positional inputs only: got {', '.join(kwargs)}")
    args = ctx.arg_mbs[first.micro_batch] if ctx.arg_mbs else ()
    output: Any = None

    def backward(_kind: str, chunk: Mapping[str, Any], **_last: bool) -> tuple[tuple[Tensor | None, ...], None]:
        """Replaces the second stage's backward. It runs the pair in place of the first stage's forward."""
        nonlocal output
        root, grads = chunk["stage_output"], chunk["output_grads"]
        loss, outputs = (root, None) if isinstance(root, Tensor) else (None, root)

        def forward(*inputs: Tensor) -> Any:
            method = type(first.module).overlapped_forward_backward
            return method(first.module, list(inputs), None, None, second.module, loss, outputs, grads)[0]

        with _replaced(first.stage, "forward_maybe_with_nosync", forward):
            output = first.stage.forward_one_chunk(first.micro_batch, args, {})
        return _pop_grads(chunk["input_values"]), None

    first.wait(first.schedule.fwd_recv_ops, first.index - 1)
    with _replaced(second.stage, "backward_maybe_with_nosync", backward):
        second.backward(full=True)
    first.schedule._maybe_compute_loss(first.stage, output, ctx.target_mbs, first.micro_batch)
    if len(first.stage.output_chunks) < len(first.schedule._internal_losses):
        first.stage.output_chunks.clear()  # step(return_outputs=False) does not store outputs
    if following := first.stages.get(first.index + 1):
        following.set_local_fwd_input(output, first.micro_batch)


def backward_input(action: _Action, ctx: _PipelineContext) -> None:
    """Run a BACKWARD_INPUT. Layers that can defer their weight gradients compute them in BACKWARD_WEIGHT, others here.

    Torch's own W gets no parameters: it would compute the gradients of those in the loss twice.
    """
    work = _StageAction(action, ctx)
    plain = work.stage.backward_maybe_with_nosync

    def backward(_kind: str, chunk: dict[str, Any], **last: bool) -> tuple[Any, list[Any]]:
        if chunk["output_grads"] is None:
            chunk = {**chunk, "stage_output": chunk["stage_output"][0]}  # the loss
        return plain("full", chunk, **last)[0], []

    with (
        _replaced(work.stage, "backward_maybe_with_nosync", backward),
        work.module.weight_grads.defer_to((work.index, work.micro_batch)),
    ):
        work.backward(full=False)  # on the first stage, torch runs the whole backward in W


def backward_weight(action: _Action, ctx: _PipelineContext) -> None:
    """Run the BACKWARD_WEIGHT that belongs to a `backward_input`."""
    work = _StageAction(action, ctx)
    work.stage.backward_weight_one_chunk(work.micro_batch, last_backward=work.count_backward())
    work.module.weight_grads.run_deferred((work.index, work.micro_batch))


class _StageAction:
    """An action of one stage and micro-batch, with what torch's runtime does before and after its computation."""

    def __init__(self, action: _Action, ctx: _PipelineContext):
        self.index: int = action.stage_index
        self.micro_batch: Any = action.microbatch_index
        self.schedule: Any = ctx.schedule_ref
        self.stages: dict[int, Any] = {stage.stage_index: stage for stage in self.schedule._stages}
        self.stage = self.stages[self.index]
        self.module = self.stage.submod
        where = f"stage {self.index} is a {type(self.module).__name__}"
        if isinstance(self.module, FSDPModule | DistributedDataParallel):
            raise TypeError(f"{where}: modules inside FSDP or DDP are not supported")
        if not isinstance(self.module, Segmented):
            way_out = "write it as a subclass of moe_dualpipe.overlap.Segmented, or do not register this function"
            raise TypeError(f"{where}, which is not Segmented: {way_out}")
        if getattr(getattr(self.stage, "_inference_mode", None), "name", None) == "DYNAMIC":
            raise ValueError(
                f"{where}; torch inferred its shapes by running a backward on uninitialized numbers, so its gradients "
                "are wrong: give every PipelineStage its input_args and output_args"
            )

    def wait(self, received: dict[tuple[int, Any], Sequence[Any]], source: int) -> None:
        """Wait for the tensors of stage `source`, if that stage exists and is on another rank."""
        if 0 <= source < self.stage.num_stages and source not in self.stages:
            for transfer in received.pop((self.index, self.micro_batch)):
                transfer.wait()

    def backward(self, full: bool) -> None:
        self.wait(self.schedule.bwd_recv_ops, self.index + 1)
        loss = self.schedule._maybe_get_loss(self.stage, self.micro_batch)
        last = full and self.count_backward()
        self.stage.backward_one_chunk(self.micro_batch, loss=loss, full_backward=full, last_backward=last)
        if previous := self.stages.get(self.index - 1):
            previous.set_local_bwd_input(self.stage.get_local_bwd_output(self.micro_batch), self.micro_batch)

    def count_backward(self) -> bool:
        """Count a completed backward. Returns whether it is the last one of the stage in this step."""
        self.schedule.backward_counter[self.index] += 1
        return self.schedule.backward_counter[self.index] == self.schedule._n_microbatches


def _pop_grads(inputs: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Take the gradients of a chunk's inputs out of `.grad`, so that they are sent but not accumulated."""
    grads = tuple(value.grad if isinstance(value, Tensor) else None for value in inputs)
    for value in inputs:
        if isinstance(value, Tensor):
            value.grad = None
    return grads


@contextmanager
def _replaced(stage: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of the stage inside this context."""
    setattr(stage, name, function)
    try:
        yield
    finally:
        delattr(stage, name)
