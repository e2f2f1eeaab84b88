"""One rank of a training run: its model, its optimizer, and one training step.

B sequences, S positions, L layers, E experts.
"""

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..checkpoint import PartialLoad, load_checkpoint, load_tensors, load_weights, load_weights_in_part
from ..data import ReadAhead
from ..data import stores as storage
from ..expert_parallel.parameters import older_names
from ..health.heartbeat import Progress
from ..health.signals import Stop
from ..health.skipped_steps import SkippedSteps
from ..inference import eval_mode
from ..models import StageOptions
from ..models.layers import seed_of
from ..overlap.engine import engine_for
from ..overlap.labels import GRADIENTS, OPTIMIZER
from ..runtime.buffers import Buffers
from ..runtime.groups import ranks_of
from ..runtime.replicas import check_equal, gather_checksums
from ..runtime.shared_errors import build_on_all_ranks
from ..user_errors import without_frames
from .elastic import draws_of, sequences_of_step
from .expert_places import ExpertPlaces
from .freezing import freeze
from .learning_rate import learning_rate
from .metrics import load_statistics, peak_memory_mb, utilisation
from .pipeline import Pipeline
from .plan import RunPlan
from .same_text import check_same_text


class Trainer:
    """One rank of a run. All methods are collective, except `state` and `request_stop`.

    pipeline: the model, divided over the ranks. optimizer: its state. config: the options. lr_factor: a factor on the
    learning rate, which a callback may change on all ranks; checkpoints do not store it. wait_for_weights: False lets
    `train_step` return before the other ranks' new weights have arrived: call `optimizer.wait` before you read weights.
    """

    def __init__(self, plan: RunPlan, progress: Progress | None = None, stop: Stop | None = None):
        self.plan, self.config, self.schedule = plan, plan.config, plan.setup.schedule
        self.layout, self.device, self.dtype = plan.setup.layout, plan.setup.device, plan.setup.dtype
        config, model, kernels = plan.config, plan.config.model, plan.setup.kernels
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        check_same_text(plan.text)
        self.progress = progress or Progress()
        end_id = plan.text.tokenizer.end_id if config.batch.document_mask else None
        options = StageOptions(
            config.seed, config.compute.recompute, kernels, config.compute.fused_loss, end_id,
            compiled=plan.setup.compiled,
        )  # fmt: skip
        self.pipeline = Pipeline(
            model, self.schedule, (config.batch.micro_batch_size, config.batch.seq_len), self.device, self.dtype,
            ep=config.parallel.ep, ep_backend=config.parallel.ep_backend, options=options,
            overlap=config.parallel.overlap, max_deferred=config.parallel.max_deferred, timeout=config.health.timeout,
            on_action=self.progress.note, cuda_graphs=config.compute.cuda_graphs,
            sum_by_choice=config.parallel.expert_sums == "choice",
        )  # fmt: skip
        self.stages, self.groups, self.replicas = self.pipeline.stages, self.pipeline.groups, self.pipeline.replicas
        self.executor, self.balance = self.pipeline.executor, self.pipeline.balance
        self.progress.watch(engine_for(self.device), self.executor.p2p, ranks_of(self.groups.experts))
        self.balance.rate = config.bias_rate
        freeze(self.stages.values(), config.freeze, model.num_experts)
        *_, trained = self.count_parameters()
        if not trained:
            raise ValueError("all parameters of the model are frozen (requires_grad=False): there is nothing to train")
        self.buffers = build_on_all_ranks(self._build_buffers)
        self.optimizer = self.pipeline.optimizer(config.optim, config.parallel.zero)
        self.executor.before_stage = self._wait_for_weights
        self.skipped = SkippedSteps(config.health.max_skipped, announce=self.layout.rank == 0)
        self.stop, self.stopping, self.lr_factor = stop or Stop(), False, 1.0
        self.wait_for_weights = True
        self._remote_bytes = self._data_waits = 0.0
        count, drawn = self.pipeline.num_sequences, plan.sequences
        draws = draws_of(self.layout.dp_rank * count, count, drawn)
        self.read_ahead = build_on_all_ranks(
            lambda: ReadAhead(plan.text, config.seed, draws, drawn, config.batch.seq_len, config.steps)
        )
        self.places: ExpertPlaces | None = None
        self.partial: PartialLoad | None = None  # what --weights-partial loaded
        if plan.resume:
            load_checkpoint(plan.resume, self.state(), older_names(self.stages.values()))
            self.optimizer.after_load(plan.first_step - int(self.skipped.total))
        elif plan.weights is not None:
            load_tensors(plan.weights, model.num_experts, self.state(), self.stages.values())
            self.optimizer.after_load(0)
        elif config.checkpoint.weights:
            load = load_weights_in_part if config.checkpoint.weights_partial else load_weights
            folder = storage.local_path(config.checkpoint.weights, config.checkpoint.staging)
            self.partial = load(folder, self.state(), older_names(self.stages.values()))
            self.optimizer.after_load(0)
        self.places = self._place_experts()
        self.utilisation = utilisation(
            model, config.batch.seq_len, self.device, self.dtype, dist.get_world_size(), config.metrics.peak_tflops
        )

    def state(self) -> dict[str, Tensor]:
        """This rank's part of a checkpoint, by global name. Loading into these tensors restores the run."""
        state = self.optimizer.tensors() | self.buffers.state() | {"skipped": self.skipped.total}
        return self.places.by_expert(state) if self.places else state

    def _place_experts(self) -> ExpertPlaces | None:
        """The places of experts, if they can change. Raises ValueError, on all ranks, for invalid ones."""
        parallel = self.config.parallel
        if not (parallel.place_experts or parallel.move_experts_every):
            return None
        places = ExpertPlaces(self.pipeline, self.optimizer, parallel)
        if parallel.place_experts:
            places.start(parallel.place_experts, self.plan.resume)
        return places

    def _build_buffers(self) -> Buffers:
        """Raises ValueError for a layer with invalid `averaged_buffers`."""
        buffers = Buffers(self.stages.values(), self.groups)
        if buffers.averaged and self.config.compute.recompute == "full":
            what = f"--recompute full would change {min(buffers.averaged)} twice, once in backward"
            raise ValueError(f"{what}: use --recompute attention")
        return buffers

    def train_step(self, step: int) -> dict[str, float]:
        """Do one update and return its metrics. `step` is the number of steps before it."""
        config, layout = self.config, self.layout
        self.progress.begin(step + 1)
        start = time.perf_counter()
        before = self.buffers.copies()
        losses = self.training_losses(step, sum_gradients=True)
        self.buffers.average()
        mean = 1 / self.pipeline.num_micro_batches  # losses of micro-batches are averaged, not summed
        check_every = config.health.check_replicas_every
        # Before the update, which with ZeRO overwrites all replicas with the owner's weights.
        checksums = self._gather_checksums() if check_every and (step + 1) % check_every == 0 else None
        if step == self.plan.first_step:
            self._check_registered()
        with self.progress.during(GRADIENTS), record_function(GRADIENTS):
            norm = self.pipeline.sum_gradients() * mean
        clip, lr = config.optim.clip, self.lr_factor * learning_rate(config.optim, step, config.steps)
        # The host waits for the device before the update, not after it: the next step starts without a wait.
        with self.progress.during("expert loads"):
            load_LE = self.balance.loads(self.device)
        loss, norm_value = self._mean(losses), norm.item()
        waits = {"data_waits": int(self._data_waits)} if self.read_ahead.files else {}
        remote = {"mb_between_machines": round(self._remote_bytes / 1e6, 3)} if self._remote_bytes else {}
        times = self._background_times()
        mtp_loss = {"mtp_loss": self._mtp_loss()} if config.model.mtp_layers else {}
        if checksums:
            self.check_replicas(checksums)
        finite = self.skipped.finite(step + 1, loss, norm_value)
        balance = self.balance.after_step(load_LE, self.device, move=finite)
        with self.progress.during(OPTIMIZER), record_function(OPTIMIZER):
            if finite:
                self.optimizer.step(lr, mean * (clip / norm.clamp(min=clip) if clip else 1.0), self.wait_for_weights)
            else:
                self.optimizer.drop_gradients()
                self.buffers.restore(before)
        moved = {}
        if self.places:
            with self.progress.during("moves of experts"):
                moved = self.places.after_step(load_LE, step + 1)
        seconds = time.perf_counter() - start
        tokens = self.pipeline.num_sequences * layout.dp * config.batch.seq_len
        mfu = {"mfu": round(self.utilisation * tokens / seconds, 4)} if self.utilisation else {}
        return {
            "step": step + 1, "loss": loss, "grad_norm": norm_value, "lr": lr, "skipped": int(self.skipped.total),
            "seconds": round(seconds, 4), "tokens": tokens, "tokens_per_s": round(tokens / seconds, 1), **mfu,
            "peak_memory_mb": round(peak_memory_mb(self.device), 1), **times, **remote, **waits,
            **load_statistics(load_LE), **mtp_loss, **balance, **moved,
        }  # fmt: skip

    def _background_times(self) -> dict[str, float]:
        """How long the sums of gradients and the gathers of weights took, and how long this rank waited for them.

        The device must have come so far. Empty without replicas.
        """
        if all(one.group is None for one in self.replicas):
            return {}
        sums, gathers = (one.take_times() for one in (self.pipeline.background, self.optimizer.gathers.background))
        return {
            "reduce_seconds": round(sums.running, 5), "reduce_exposed_seconds": round(sums.exposed, 5),
            "gather_seconds": round(gathers.running, 5), "gather_exposed_seconds": round(gathers.exposed, 5),
        }  # fmt: skip

    def validation_loss(self) -> float:
        """The mean loss of the held-out sequences in nats per token, the same on all ranks.

        Raises ValueError for a run with `batches` and without `validation`.
        """
        if not self.plan.text.has_held_out:
            raise ValueError("validation_loss needs held-out sequences: pass them to `train` as `validation`")
        with self.progress.during("validation"):
            return self._mean([loss for losses in self.validation_losses() for loss in losses])

    def training_losses(self, step: int, sum_gradients: bool = False) -> list[Tensor]:
        """Run forward and backward of a step, where `step` is the number of steps before it. Returns its losses.

        sum_gradients: as for `Pipeline.step`.
        """
        config, layout, count = self.config, self.layout, self.pipeline.num_sequences
        torch.manual_seed(seed_of(config.seed, f"step {step} of rank {layout.rank}"))  # for dropout
        self.read_ahead.advance(step)
        first, drawn = layout.dp_rank * count, self.plan.sequences
        batch = sequences_of_step(self.plan.text, config.seed, step, first, count, drawn, config.batch.seq_len)
        return self.pipeline.step(*batch, sum_gradients)

    @torch.no_grad()
    def validation_losses(self) -> Iterator[list[Tensor]]:
        """Run the held-out sequences in batches. Yields the losses of each batch, as from `Pipeline.step`."""
        layout, count = self.layout, self.pipeline.num_sequences
        batches = -(-self.config.metrics.eval_sequences // (count * layout.dp))
        total = batches * layout.dp * count
        for i in range(batches):
            self.read_ahead.held_out((i * layout.dp + layout.dp_rank) * count, count, total)
        for i in range(batches):
            first = (i * layout.dp + layout.dp_rank) * count
            batch = self.plan.text.held_out_batch(first, count, total, self.config.batch.seq_len)
            with eval_mode(self.stages.values()):
                losses = self.pipeline.step(*batch)
            yield losses

    def request_stop(self) -> None:
        """Stop the run after this step. For callbacks; one rank is enough. Not collective."""
        self.stop.requested = True

    def agree_to_stop(self) -> None:
        """If a rank was asked to stop, all ranks stop after this step."""
        self.stopping |= self.largest(float(self.stop.requested)) > 0

    def sample(self, prompt: str | None = None, num_tokens: int | None = None) -> str:
        """The model's continuation of the prompt. None: as in `config.sample`."""
        config, tokenizer = self.config, self.plan.text.tokenizer
        text = config.sample.prompt if prompt is None else prompt
        tokens_S = torch.tensor(tokenizer.encode(text or "\n"))
        number = config.sample.sample_tokens if num_tokens is None else num_tokens
        with self.progress.during("sampling"):
            tokens = self.pipeline.generate([tokens_S], number, config.sample.sampling(), config.seed)
        return tokenizer.decode(tokens[0].tolist())

    def _check_registered(self) -> None:
        """Raise RuntimeError for a parameter that a layer created in forward: it would be neither trained nor saved."""
        known = {id(p) for replicas in self.replicas for p in replicas.parameters.values()}
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in known:
                    raise without_frames(
                        RuntimeError(f"{name} was created after the optimizer was built: create it in the constructor")
                    )

    def check_replicas(self, checksums: Sequence[Tensor | None] = ()) -> None:
        """Raise RuntimeError if replicas of a parameter or buffer differ. checksums: from `_gather_checksums`."""
        compared = (*self.replicas, *self.buffers.sets())
        for replicas, sums_RP in zip(compared, checksums or self._gather_checksums(), strict=True):
            check_equal(replicas, sums_RP)

    def _wait_for_weights(self, stage: int) -> None:
        with self.progress.waiting_for(f"new weights of stage {stage}"):
            self.optimizer.wait(stage)

    def _gather_checksums(self) -> list[Tensor | None]:
        self.optimizer.wait()
        with self.progress.during("comparison of replicas"):
            return [gather_checksums(replicas) for replicas in (*self.replicas, *self.buffers.sets())]

    def count_parameters(self) -> tuple[float, float, float]:
        """The numbers of dense and of expert parameters of the whole model, and of those that are trained."""
        counts = torch.zeros(3, dtype=torch.float64)
        for replicas in self.replicas:
            for parameter in replicas.parameters.values():
                number = parameter.numel() / replicas.num_replicas
                counts[int(bool(replicas.experts))] += number
                counts[2] += number * parameter.requires_grad
        dist.all_reduce(counts)
        dense, experts, trained = counts.tolist()
        return dense, experts, trained

    def largest(self, value: float) -> float:
        """The maximum of the ranks' values."""
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def _mean(self, losses: list[Tensor]) -> float:
        """The mean loss over all ranks.

        The same all-reduce tells all ranks whether one was asked to stop, and how many bytes dispatch and combine have
        sent between machines, and how often data was waited for, since the last one.
        """
        experts = self.pipeline.expert_parallel
        experts.check()
        total = torch.zeros(5, dtype=torch.float64)
        if losses:
            total[0], total[1] = torch.stack(losses).double().sum().item(), len(losses)
        total[2], total[3] = self.stop.requested, experts.take_remote_bytes()
        total[4] = self.read_ahead.take_waits()
        if self.layout.dp * self.layout.pp > 1 or dist.is_initialized():  # a finished run of one process has no group
            with self.progress.during("mean loss"):
                dist.all_reduce(total)
        loss, count, stop_requests, self._remote_bytes, self._data_waits = total.tolist()
        self.stopping = stop_requests > 0
        return loss / count

    def _mtp_loss(self) -> float:
        """The mean loss of multi-token prediction (MTP) in this step. The training loss does not include it."""
        last = self.stages.get(self.schedule.num_stages - 1)
        return self._mean([last.mtp.take_loss()] if last is not None and last.mtp is not None else [])
