"""A model divided over the processes: this rank's stages, with their process groups, links and executor.

It contains only what every training loop needs: forward and backward of a batch, the sum of the gradients over
replicas, expert load balancing, and the mean loss. Everything else is left to the loop.

B sequences, S positions, L layers, E experts.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..expert_parallel import ByChoice, ExpertParallel, Fp8Dispatch, choose_backend
from ..expert_parallel.gather import sum_over_ranks
from ..kernels.fp8 import weights_unchanged
from ..messages import plural
from ..models import (
    ModelConfig,
    TransformerStage,
    attention_kernels,
    elementwise_matrices,
    share_embedding,
    split,
    stacked_matrices,
)  # fmt: skip
from ..models.auxiliary_losses import loss_factors
from ..models.context_parallel import Context, check_context
from ..models.mtp import MTPBatch, targets
from ..overlap import WeightGrads
from ..runtime import P2P, Executor, TensorSpec
from ..runtime.background import Background
from ..runtime.compiled import CompiledMicroBatch
from ..runtime.graphs import MicroBatchGraph
from ..runtime.groups import EXPERTS, build_groups, product_sms
from ..runtime.layout import Layout, check_cp, check_ep, divisors
from ..runtime.learning_rate import OptimizerConfig
from ..runtime.memory import queue_copy
from ..runtime.optimizer import Optimizer
from ..runtime.replicas import Shards, gradient_norm, replica_sets
from ..runtime.shared_errors import build_on_all_ranks
from ..runtime.stage import Criterion
from ..runtime.stage_sums import GradientSums, StageOrder
from ..runtime.warm_up import load_kernels
from ..schedule import Action, Schedule
from .balance import Balance
from .labels import Batch, StepLabels, all_equal, check_shape, checksum_terms, step_labels, token_ids
from .settings import NOT_PARALLEL, ON_CPU, Numerics, Parallel
from .update_order import Gradients, UpdateOrder


class Pipeline:
    """This rank's part of a model that runs under `schedule`. All methods are collective.

    The processes form pipelines of `schedule.num_ranks` ranks; with more processes, there are several pipelines (data
    parallelism). Without torch.distributed, this process is the only one.

    micro_batch: the shape [B, S] of the token ids of one micro-batch. on_action: called with each action when it
    begins, and with None at the end of a step. `whole` may be set to None, to run the schedule.

    divided: whether `sum_gradients` gives each rank only the sums of the tensors that it owns. `optimizer` sets it.

    An update is: one or more calls of `step`, `sum_gradients`, then an optimizer. Another order raises RuntimeError.
    Raises ValueError, on all ranks, if the schedule, `ep` or the model does not fit the number of processes.
    """

    def __init__(
        self, model: ModelConfig, schedule: Schedule, micro_batch: tuple[int, int], parallel: Parallel = NOT_PARALLEL,
        numerics: Numerics = ON_CPU, *, on_action: Callable[[Action | None], None] | None = None,
    ):  # fmt: skip
        self.model, self.schedule, self.micro_batch, self.dtype = model, schedule, micro_batch, numerics.dtype
        self.specs = split(model, schedule.num_stages, parallel.layers)
        self.device, self.options, self._on_action = torch.device(numerics.device), numerics.options, on_action
        self.layout = _layout(schedule, parallel, model.num_experts)
        timeout = parallel.timeout
        self.groups = build_groups(self.layout, schedule.placement, timeout, model.last_stage_embeds)
        if parallel.overlap and self.options.num_sms is None and (self.groups.experts or self.groups.context):
            self.options = replace(self.options, num_sms=product_sms(self.device))
        check_context(parallel.cp, micro_batch[1])
        self.context = None if self.groups.context is None else Context(self.groups.context)
        self.options = replace(self.options, context=self.context)
        self.own_shape = own = micro_batch[0], micro_batch[1] // parallel.cp
        group, kernels = self.groups.experts, self.options.kernels
        max_tokens, top_k = math.prod(own), model.experts_per_token
        if sum_by_choice := parallel.expert_sums == "choice":
            max_tokens, top_k = max_tokens * top_k, 1
        self.expert_parallel = build_on_all_ranks(
            lambda: choose_backend(
                parallel.ep_backend, model.num_experts, group, self.device, kernels=kernels, max_tokens=max_tokens,
                hidden_size=model.hidden_size, top_k=top_k, dtype=self.dtype, timeout=timeout,
            )
        )  # fmt: skip
        backend = self.expert_parallel.backend
        experts = ByChoice(backend) if sum_by_choice else backend
        if numerics.fp8_dispatch and self.options.fp8 is not None:
            experts = Fp8Dispatch(experts, self.options.fp8)
        self.stages = build_on_all_ranks(lambda: self._build_stages(experts))
        embedding = share_embedding(self.stages.values())
        links = P2P.connect(self.groups.pipeline, (), self.device, timeout=timeout, directions=self.groups.links)
        # Without transfers in the background, only a context or a custom block can have communication to hide.
        hidden_transfers = backend.in_background or self.context is not None or "block" in model.own_layers
        overlap = parallel.overlap and hidden_transfers
        deferred = WeightGrads(parallel.max_deferred, parallel.wgrad == "late")
        self.executor = Executor(self.stages, links, deferred, overlap, on_action)
        self.send_documents(False)
        self.replicas = replica_sets(self.stages.values(), self.groups, embedding)
        self.background, self.divided = Background(self.device), False
        self.order = StageOrder.of(schedule, self.stages)
        self._sums: GradientSums | None = None
        self.whole = {"": None, "cuda_graph": self._graph, "compiled": self._compiled}[numerics.whole]
        self.balance = Balance(model, self.stages, rate=0.0)
        self._kernels_loaded = self.device.type != "cuda"  # a CPU loads none
        self._order = UpdateOrder(p for stage in self.stages.values() for p in stage.parameters())
        self._num_steps = 0

    def _build_stages(self, experts: ExpertParallel) -> dict[int, TransformerStage]:
        """The stages of this rank. Raises ValueError for layers that cannot be built."""
        stages, default = {}, torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # with another default dtype, other weights would be drawn
        try:
            for index in self.schedule.placement.stages[self.layout.pp_rank]:
                stage = TransformerStage(self.model, self.specs[index], experts, self.options)
                stages[index] = stage.to(self.device, self.dtype)
        finally:
            torch.set_default_dtype(default)
        return stages

    @property
    def num_sequences(self) -> int:
        """Sequences of one step on each data-parallel rank."""
        return self.schedule.num_micro_batches * self.micro_batch[0]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step on all ranks of a stage. With a context, each rank has a part of one."""
        return self.schedule.num_micro_batches * self.layout.replicas

    def optimizer(self, config: OptimizerConfig, zero: bool = True) -> Optimizer:
        """The optimizer of this rank's parameters. zero: divide its state among ranks with the same parameters.

        With `zero`, `sum_gradients` gives each rank only the sums that its optimizer needs.

        Raises ValueError, on all ranks, for layers with invalid `stacked` or `elementwise`.
        """
        stages = self.stages.values()
        optimizer = build_on_all_ranks(
            lambda: Optimizer(
                self.replicas, config, zero, stacked_matrices(stages), elementwise_matrices(stages), self.order
            )
        )
        self.executor.before_stage, self.divided = optimizer.wait, zero
        optimizer.before_update = self._order.before_update
        return optimizer

    def step(
        self, inputs_BS: Tensor, labels_BS: Tensor, documents_BS: Tensor | None = None, *, sum_gradients: bool = False,
        num_labels: float | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Run forward and backward of one batch; under `torch.no_grad()`, only forward.

        sum_gradients: start the sum of a stage's gradients over replicas when they are complete, while the pipeline
        drains. Call `sum_gradients` afterwards, before another step. For the last batch of an update.

        inputs_BS, labels_BS: token ids of `num_sequences` sequences, the same on all ranks of a pipeline. Labels of
        -100 are ignored. Positions after the last label of a sequence are padding: they count in no loss and no expert
        load (labels.py). num_labels: the number of the other labels on all data-parallel ranks; None: count them.
        documents_BS: the number of the document of each position, below S, or -1 for padding. A document does not
        depend on the others: for attention, MTP and router losses, it is a sequence of its own. None: a sequence is one
        document.

        Returns a loss for each micro-batch whose last stage is on this rank, in nats per token. A micro-batch with
        more labels than the average counts proportionally more, so the mean of all losses (`mean_loss`) is the mean
        over all labeled tokens. Their gradients, summed over micro-batches, are added to those of the parameters.
        Raises ValueError for inputs or labels of another shape, for a batch without any label, and for one that
        differs between the ranks of a pipeline, which the first step and every 100th compare.
        """
        self.send_documents(documents_BS is not None)
        if not self._kernels_loaded:
            self.load_kernels()
        self._order.before_step()
        trains = torch.is_grad_enabled()
        given = Batch(inputs_BS, labels_BS, documents_BS).tensors
        ids = {name: token_ids(name, tensor) for name, tensor in given.items()}
        for name, tensor in ids.items():
            check_shape(name, tensor, self.schedule.num_micro_batches, self.micro_batch)
        batch = Batch(**ids).checked()
        self._check_same_batch(*batch.tensors.values())
        depths, routers = self.model.mtp_layers * trains, trains and self._routers_see_sequences
        found = step_labels(batch, self.micro_batch[0], self.layout, depths, num_labels, self.context, routers)
        sums = self._gradient_sums() if sum_gradients else None
        if self.whole is not None and trains:
            losses = self._run_whole(batch, found)
        else:
            losses = self._run_schedule(batch, found, sums)
        if sums:
            sums.start_all()
        if trains:
            self._order.note(Gradients.STARTED if sums else Gradients.ADDED)
        if self._on_action is not None:
            self._on_action(None)
        return losses

    @property
    def _routers_see_sequences(self) -> bool:
        """Whether a router has a loss, which may be a mean over the positions of a sequence."""
        return bool(loss_factors(self.model)) or "router" in self.model.own_layers

    def _run_schedule(self, batch: Batch, found: StepLabels, sums: GradientSums | None) -> list[Tensor]:
        schedule, pp_rank, last = self.schedule, self.layout.pp_rank, self.schedule.num_stages - 1
        layers, size = self.balance.layers.values(), self.micro_batch[0]
        trains = torch.is_grad_enabled()
        padded = trains and found.positions is not None
        routes = any(moe.recorded_RSK is not None or moe.replayed_RSK is not None for moe in layers)
        by_row = padded or (trains and routes)
        inputs, labels, arguments = {}, {}, {}
        no_documents = [None] * (batch.documents is None)
        for m, (x, y, documents) in enumerate(batch.split(size)):
            rows_B = torch.arange(m * size, (m + 1) * size, device=self.device) if by_row else None
            weight, *mtp_weights = found.micro_batches[m]
            if schedule.rank_of(0, m) == pp_rank:
                inputs[m] = self.inputs_of(x, documents)
            if schedule.rank_of(last, m) == pp_rank:
                mtp = None
                if mtp_weights:
                    shifted = targets(len(mtp_weights), y, x, self.context, documents)
                    there = [(queue_copy(t, self.device), queue_copy(u, self.device)) for t, u in shifted]
                    copied = None if documents is None else queue_copy(documents, self.device)
                    mtp = MTPBatch(there, mtp_weights, rows_B, copied)
                labels[m] = (queue_copy(self.cut(y), self.device), weight, mtp)
            arguments[m] = (*no_documents, None, rows_B)  # no cache
        criterion = self.stages[last].loss if last in self.stages else None
        for moe in layers if padded else ():
            assert found.positions is not None
            moe.weights_RS = queue_copy(found.positions[max(0, moe.layer - self.model.num_layers + 1)], self.device)
            if batch.documents is not None:
                numbers = self.cut(batch.documents)[:, : moe.weights_RS.shape[1]]
                moe.documents_RS = queue_copy(numbers.contiguous(), self.device)
        try:
            with weights_unchanged() if self.options.fp8 else nullcontext():
                on_gradients = sums.complete if sums else None
                result = self.executor.step(
                    schedule, inputs, labels, criterion, on_gradients=on_gradients, context=arguments
                )
        finally:
            for moe in layers:
                moe.weights_RS = moe.documents_RS = None
        return list(result.losses.values())

    def send_documents(self, send: bool) -> None:
        """Say whether stages send the numbers of documents, four bytes a token, along with hidden states."""
        hidden = TensorSpec((*self.own_shape, self.model.hidden_size), self.dtype)
        documents = [TensorSpec(self.micro_batch, torch.int32)] * send
        self.executor.p2p = self.executor.p2p.with_specs([hidden, *documents])

    def cut(self, x_BS: Tensor) -> Tensor:
        """The positions of `x_BS` that this rank runs."""
        return x_BS if self.context is None else self.context.cut(x_BS)

    def inputs_of(self, tokens_BS: Tensor, documents_BS: Tensor | None) -> tuple[Tensor, ...]:
        """The inputs of the first stage: the tokens of this rank's positions, and the document numbers of all."""
        tensors = (self.cut(tokens_BS),) if documents_BS is None else (self.cut(tokens_BS), documents_BS)
        return tuple(queue_copy(tensor, self.device) for tensor in tensors)

    def _run_whole(self, batch: Batch, found: StepLabels) -> list[Tensor]:
        """Run each micro-batch as one graph, or as one compiled function."""
        assert self.whole is not None
        if found.positions is not None or any(weight != 1 for _, *mtp in found.micro_batches for weight in mtp):
            what = "labels of -100 after the last label of a sequence" if found.positions is not None else "MTP"
            raise ValueError(
                f"cuda_graphs and --compile whole cannot leave out padding, or -100 with MTP: got {what}; use "
                "--compile off and --set compute.cuda_graphs=false"
            )
        weights = queue_copy(torch.tensor([weight for weight, *_ in found.micro_batches]), self.device)
        return [
            self.whole(self.inputs_of(x, documents), (queue_copy(y, self.device), weight))
            for (x, y, documents), weight in zip(batch.split(self.micro_batch[0]), weights, strict=True)
        ]

    def _check_same_batch(self, *tensors: Tensor) -> None:
        """Raise ValueError, on all ranks, if the batches of the ranks of a pipeline differ. The first step and every
        100th are compared. Collective."""
        self._num_steps += 1
        sharing = self.layout.pp * self.layout.cp
        if sharing == 1 or self._num_steps % 100 != 1:
            return
        checksums = torch.zeros(self.layout.dp, 2, dtype=torch.float64)
        checksums[self.layout.dp_rank] = checksum_terms(*tensors)
        if not all(all_equal(sums, sharing) for sums in sum_over_ranks(checksums).tolist()):
            raise ValueError(
                "the ranks of a pipeline got different batches, so inputs and labels do not belong together: pass the "
                "same ones on each, for example by seeding torch.randint with the number of the step"
            )

    def _graph(self, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """Capture a CUDA graph, for later micro-batches too, and run this one. Returns its loss."""
        stages, criterion = self._whole_model()
        self.whole = MicroBatchGraph(stages, self.executor.weight_grads, criterion, inputs, labels)
        return self.whole(inputs, labels)

    def _compiled(self, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """Compile a function, for later micro-batches too, and run this one. Returns its loss."""
        self.whole = CompiledMicroBatch(*self._whole_model())
        return self.whole(inputs, labels)

    def _whole_model(self) -> tuple[list[TransformerStage], Criterion]:
        stages = [self.stages[index] for index in sorted(self.stages)]
        return stages, stages[-1].loss

    def load_kernels(self) -> None:
        """Load the kernels of all stages, before any transfer between stages (runtime/warm_up.py). Collective."""
        shape, last = self.own_shape, self.schedule.num_stages - 1
        criterion = self.stages[last].loss if last in self.stages else None
        with torch.random.fork_rng():  # the inputs and dropout
            tokens_BS = torch.randint(self.model.vocab_size, shape, device=self.device)
            hidden, *documents = (spec.random(self.device) for spec in self.executor.p2p.specs)
            inputs = {index: (hidden if index else tokens_BS, *documents) for index in self.stages}
            load_kernels(self.stages, inputs, self.executor.weight_grads, criterion, (tokens_BS,))
        for layer in self.balance.layers.values():
            layer.take_losses()
        self._kernels_loaded = True

    def sum_gradients(self) -> Tensor:
        """Sum all gradients over replicas. Returns the norm of all gradients of the model in fp32, equal on all ranks.

        The gradient of the mean loss is the sum divided by `num_micro_batches`. If an optimizer divides its state
        (`divided`), a rank gets only the sums that its optimizer needs. Raises RuntimeError if no step with gradients
        has run since the last sum.
        """
        if not self._order.added and not sum_over_ranks(torch.tensor(float(self._order.has_gradients()))):
            raise RuntimeError("sum_gradients needs a step with gradients since the last sum: there was none")
        norm = gradient_norm(self._gradient_sums().finish(), self.device)
        self._order.note(Gradients.SUMMED)
        return norm

    def _gradient_sums(self) -> GradientSums:
        """Built at the first sum, so that parameters can be frozen before it."""
        trained = [one.only(trained=True) for one in self.replicas]
        planned = self.divided, [[*one.parameters] for one in trained]
        if self._sums is None or planned != (self._sums.shards[0].divide, self._sums.names):
            shards = [Shards(one, self.divided) for one in trained]
            self._sums = GradientSums(shards, self.order, self.background)
        return self._sums

    def balance_experts(self, rate: float) -> Tensor:
        """Move the biases of the routers (`router_bias`) by `rate`, to balance the loads of this step.

        Call it after the update of the weights. Returns the loads: tokens per layer and expert, [L, E].
        """
        self.balance.rate = rate
        load_LE = self.balance.loads(self.device)
        self.balance.after_step(load_LE, self.device)
        return load_LE

    def gpu_choices(self) -> str:
        """What was chosen for GPUs: the kernels that attention has used, and the division of the multiprocessors."""
        kernels = sorted({name for stage in self.stages.values() for name in attention_kernels(stage)})
        text = f"attention: {', '.join(kernels) or 'custom'}"
        if (sms := self.options.num_sms) is not None:
            text += f"; products of experts use at most {sms} SMs, dispatch and combine {EXPERTS.max_ctas}"
        return text

    def count_labels(self, batches: Iterable[Batch]) -> float:
        """The number of labels that count in `batches`, on all data-parallel ranks. Collective."""
        total = torch.tensor(sum(float((batch.labels >= 0).sum()) for batch in batches), dtype=torch.float64)
        return sum_over_ranks(total).item() / (self.layout.pp * self.layout.cp)

    def mean_loss(self, losses: Sequence[Tensor]) -> float:
        """The mean over all ranks of the losses that `step` returned."""
        total = torch.zeros(2, dtype=torch.float64)
        if losses:
            total[0], total[1] = torch.stack([*losses]).double().sum().item(), len(losses)
        sum_over_ranks(total)
        return (total[0] / total[1]).item()


def _layout(schedule: Schedule, parallel: Parallel, num_experts: int) -> Layout:
    """The place of this rank. Raises ValueError if the processes cannot form pipelines of the schedule's ranks."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    pp = schedule.num_ranks
    if size % pp:
        use = " or ".join(map(str, divisors(size)))
        raise ValueError(
            f"a schedule for {plural(pp, 'rank')} does not fit {plural(size, 'process', 'es')}: "
            f"build it for {plural(size, 'rank') if size == 1 else f'{use} ranks'}, or start a multiple of {pp} "
            "processes with torchrun"
        )
    check_cp(parallel.cp, size // pp)
    check_ep(
        parallel.ep, num_experts, size // pp, f" ({plural(size, 'process', 'es')} / {plural(pp, 'pipeline rank')})"
    )
    return Layout(pp, size // (pp * parallel.cp), parallel.ep, rank, cp=parallel.cp)
