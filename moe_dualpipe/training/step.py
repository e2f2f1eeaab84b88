"""One rank of a training run: its model, its optimizer, and one training step.

B sequences, S positions, L layers, E experts.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..checkpoint import PREFIX, PartialLoad, load_adapter, load_checkpoint, load_tensors, load_weights
from ..data import GivenBatches, TextData
from ..expert_parallel.gather import gather_objects, sum_over_ranks
from ..expert_parallel.labels import COMBINE, DISPATCH
from ..health.heartbeat import Progress
from ..health.signals import Stop
from ..inference import eval_mode, generate_through_pipeline
from ..kernels.options import RoutingOptions
from ..kernels.products import use_products
from ..messages import check_range, plural
from ..models.adapters import relative_updates, squared_norms
from ..models.context_parallel import KEYS
from ..models.layers import seed_of, seed_torch
from ..models.lora import adapted_weight
from ..overlap.engine import engine_for
from ..overlap.labels import GRADIENTS, OPTIMIZER
from ..pipeline.freezing import freeze
from ..pipeline.labels import all_equal, checksum_terms
from ..pipeline.pipeline import Pipeline
from ..pipeline.settings import Numerics
from ..runtime.groups import ranks_of
from ..runtime.known_gpus import peak_flops
from ..runtime.learning_rate import learning_rate
from ..runtime.memory import keep_freed_memory
from ..runtime.shared_errors import build_on_all_ranks
from .config import TrainConfig
from .extensions import Extension, Update
from .extensions.balance import Balancing
from .extensions.expert_moves import ExpertMoves
from .extensions.replica_checks import FixedBuffers, ReplicaChecks
from .extensions.routes import Routes
from .extensions.skipped_steps import SkippedSteps
from .extensions.timings import Timings
from .metrics import utilization
from .resolve import Run


class Trainer:
    """One rank of a run. All methods are collective, except `state` and `request_stop`.

    pipeline: the model, divided over the ranks. optimizer: its state. config: the options. lr_factor: a factor on the
    learning rate, which a callback may change on all ranks; checkpoints do not store it. wait_for_weights: False lets
    `step` return before the other ranks' new weights have arrived: call `optimizer.wait` before you read weights.
    extensions: what else a step does (extensions/).
    """

    def __init__(self, run: Run, progress: Progress | None = None, stop: Stop | None = None):
        self.run, self.config, self.text, self.schedule = run, run.config, run.text, run.schedule
        self.layout, self.device, self.first_step = run.layout, run.device, run.start.first_step
        self.progress, self.stop, self.stopping = progress or Progress(), stop or Stop(), False
        self.lr_factor, self.wait_for_weights, self.remote_bytes = 1.0, True, 0
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        numerics = build_on_all_ranks(lambda: trusted(run.config, run.numerics))
        self.run = replace(run, numerics=numerics)
        use_products(numerics.products)
        if self.device.type == "cpu":
            keep_freed_memory()
        self._seed_batch(self.first_step)
        check_same_text(self.text)
        micro_batch = run.choice.micro_batch_size, self.config.batch.seq_len
        self.pipeline = Pipeline(
            self.config.model, self.schedule, micro_batch, run.parallel, numerics, on_action=self.progress.note
        )
        self.stages, self.replicas, self.balance = self.pipeline.stages, self.pipeline.replicas, self.pipeline.balance
        groups = self.pipeline.groups
        experts, context = ranks_of(groups.experts), ranks_of(groups.context)
        transfers = {DISPATCH: experts, COMBINE: experts, KEYS: context}
        self.progress.watch(engine_for(self.device), self.pipeline.executor.p2p, transfers)
        self.balance.rate = 0.0 if self.config.lora.rank else self.config.bias_rate  # an adapter has no biases
        freeze(self.stages.values(), self.config.freeze, self.config.model.num_experts)
        *_, trained = self.count_parameters()
        if not trained:
            raise ValueError("all parameters of the model are frozen (requires_grad=False): there is nothing to train")
        fixed = FixedBuffers(self)
        self.buffers = fixed.buffers
        self.optimizer = self.pipeline.optimizer(self.config.optim, self.config.parallel.zero)
        self.skipped = SkippedSteps(self.config.health.max_skipped, announce=self.layout.rank == 0)
        self.replica_checks = ReplicaChecks(self)
        self.extensions: list[Extension] = [self.skipped, fixed, self.replica_checks]
        self.partial = self._load()
        factor = utilization(
            self.config.model, self.config.batch.seq_len, dist.get_world_size(), peak_flops_of(self.config, numerics)
        )
        moves = [ExpertMoves(self)] if self.config.parallel.move_experts_every and self.layout.ep > 1 else []
        routes = [Routes(self)] if self.config.batch.record_routes or self.config.batch.replay_routes else []
        self.balancing = Balancing(self)
        self.extensions += [self.balancing, *moves, *routes, Timings(self, factor)]
        self.extensions += [built for build in run.instruments.extensions if (built := build(self)) is not None]

    def _load(self) -> PartialLoad | None:
        """Load what the run starts from. Returns what --weights-partial loaded."""
        start, partial, state = self.run.start, None, self.state()
        base = {name: tensor for name, tensor in state.items() if not adapted_weight(name.removeprefix(PREFIX))}
        if start.resume:
            load_checkpoint(start.resume, state)
        elif isinstance(start.weights, Path):
            loaded = load_weights(start.weights, base, self.config.checkpoint.weights_partial)
            partial = loaded if self.config.checkpoint.weights_partial else None
        elif start.weights is not None:
            load_tensors(start.weights, base)
        else:
            return None
        if self.config.lora.adapter and not start.resume:
            load_adapter(Path(self.config.lora.adapter), state, self.config.model, start.companions)
        self.optimizer.after_load(start.first_step - int(self.skipped.total) if start.resume else 0)
        return partial

    def state(self) -> dict[str, Tensor]:
        """This rank's part of a checkpoint, by global name. Loading into these tensors restores the run."""
        state = self.optimizer.tensors()
        for extension in self.extensions:
            state = extension.state(state)
        return state

    @torch.inference_mode(False)  # whatever a callback, or the import of a layer, has left
    def step(self, step: int) -> Update:
        """Do one update and return it with its metrics. `step` is the number of steps before it."""
        check_range("trainer.lr_factor", self.lr_factor, 0)
        self.progress.begin(step + 1)
        for extension in self.extensions:
            extension.before_step(step)
        losses = self.training_losses(step, sum_gradients=True)
        mean = 1 / self.pipeline.num_micro_batches  # the sum of the gradients is divided by it in the update
        with self.progress.during(GRADIENTS), record_function(GRADIENTS):
            norm = self.pipeline.sum_gradients() * mean
        # The host waits for the device before the update, not after it: the next step starts without a wait.
        with self.progress.during("expert loads"):
            load_LE = self.balance.loads(self.device)
        loss, self.stopping, self.remote_bytes = self._sum_over_ranks(step, losses)
        update = Update(step, loss, norm.item(), load_LE)
        for extension in self.extensions:
            extension.before_update(update)
        clip, lr = self.config.optim.clip, self.lr_factor * learning_rate(self.config.optim, step, self.config.steps)
        update.record |= {"step": step + 1, "loss": update.loss, "grad_norm": update.norm, "lr": lr}
        if self.config.model.mtp_layers:
            update.record["mtp_loss"] = self._mtp_loss()
        with self.progress.during(OPTIMIZER), record_function(OPTIMIZER):
            if update.finite:
                self.optimizer.step(lr, mean * (clip / norm.clamp(min=clip) if clip else 1.0), self.wait_for_weights)
            else:
                self.optimizer.drop_gradients()
        for extension in self.extensions:
            extension.after_update(update)
        return update

    @torch.inference_mode(False)
    def training_losses(self, step: int, sum_gradients: bool = False) -> list[Tensor]:
        """Run forward and backward of a step, where `step` is the number of steps before it. Returns its losses.

        sum_gradients: as for `Pipeline.step`.
        """
        config = self.config
        total, length = config.batch.batch_size, config.batch.seq_len
        self._seed_batch(step)
        batch = self.text.batch(config.seed, step, total, length, self.own_sequences)
        seed_torch(seed_of(config.seed, f"step {step} of rank {self.layout.rank}"), self.device)  # for dropout
        return self.pipeline.step(*batch, sum_gradients=sum_gradients, num_labels=self._num_labels(total))

    def _seed_batch(self, step: int) -> None:
        """Seed torch alike on all ranks: `batches` of a program may draw from it, or shuffle a DataLoader."""
        seed_torch(seed_of(self.config.seed, f"step {step}"), self.device)

    def _num_labels(self, sequences: int) -> int | None:
        """The number of labels in this many sequences of text, if it is known before they are read."""
        return sequences * self.config.batch.seq_len if self.text.all_labeled else None

    @property
    def own_sequences(self) -> range:
        """The sequences of a step that this data-parallel rank runs."""
        count = self.pipeline.num_sequences
        return range(self.layout.dp_rank * count, (self.layout.dp_rank + 1) * count)

    def validation_loss(self) -> float:
        """The mean over all labeled tokens of the held-out sequences, in nats per token, the same on all ranks.

        Raises ValueError for a run with `batches` and without `validation`.
        """
        if not self.text.has_held_out:
            raise ValueError("validation_loss needs held-out sequences: pass them to `train` as `validation`")
        with self.progress.during("validation"):
            return self.pipeline.mean_loss([loss for losses in self.validation_losses() for loss in losses])

    @torch.no_grad()
    def validation_losses(self) -> Iterator[list[Tensor]]:
        """Run the held-out sequences in batches. Yields the losses of each batch, as from `Pipeline.step`."""
        step, length = self.config.batch.batch_size, self.config.batch.seq_len
        batches = -(-self.config.metrics.eval_sequences // step)
        total, own = batches * step, step // self.layout.dp
        firsts = [batch * step + self.layout.dp_rank * own for batch in range(batches)]
        read = (self.text.held_out_batch(first, own, total, length) for first in firsts)
        if (labels := self._num_labels(total)) is None:
            read = [*read]
            labels = self.pipeline.count_labels(read)
        for batch in read:
            with eval_mode(self.stages.values()):
                losses = self.pipeline.step(*batch, num_labels=labels / batches)
            yield losses

    def request_stop(self) -> None:
        """Stop the run after this step. For callbacks; one rank is enough. Not collective."""
        self.stop.requested = True

    def agree_to_stop(self) -> None:
        """If a rank was asked to stop, all ranks stop after this step."""
        self.stopping |= self.largest(float(self.stop.requested)) > 0

    def sample(self, prompt: str | None = None, num_tokens: int | None = None) -> str:
        """The model's continuation of the prompt. None: as in `config.sample`."""
        config, tokenizer = self.config, self.text.tokenizer
        text = config.sample.prompt if prompt is None else prompt
        tokens_S = torch.tensor(tokenizer.encode(text or "\n"))
        number = config.sample.sample_tokens if num_tokens is None else num_tokens
        with self.progress.during("sampling"):
            tokens = generate_through_pipeline(self.pipeline, [tokens_S], number, config.sample.sampling(), config.seed)
        return tokenizer.decode(tokens[0].tolist())

    def check_replicas(self) -> None:
        """Raise RuntimeError if replicas of a parameter or buffer differ."""
        self.replica_checks.check()

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

    def relative_updates(self) -> dict[str, float]:
        """The norm of the updates of each kind of adapter, divided by that of the weights that they adapt."""
        return relative_updates(sum_over_ranks(squared_norms(self.stages.values())))

    def largest(self, value: float) -> float:
        """The maximum of the ranks' values."""
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def _sum_over_ranks(self, step: int, losses: Sequence[Tensor]) -> tuple[float, bool, int]:
        """In one all-reduce: the mean loss of the step, whether a rank was asked to stop, and the bytes that dispatch
        and combine sent between machines. Raises ValueError, on all ranks, if their batches differ."""
        experts = self.pipeline.expert_parallel.backend
        experts.check()
        loss = torch.stack([*losses]).double().sum().item() if losses else 0.0
        own = torch.tensor([loss, len(losses), self.stop.requested, experts.take_remote_bytes()], dtype=torch.float64)
        with self.progress.during("mean loss"):
            total = sum_over_ranks(torch.cat([own, checksum_terms(*self.text.last)]))
        loss, count, stop, remote_bytes, *checksums = total.tolist()
        if not all_equal(checksums, dist.get_world_size()):
            raise ValueError(
                f"batches({step}) is not the same on all ranks: pass the sequences of the whole step on every rank, "
                "and seed random ones with the step"
            )
        return loss / count, stop > 0, int(remote_bytes)

    def _mtp_loss(self) -> float:
        """The mean loss of multi-token prediction (MTP) in this step. The training loss does not include it."""
        last = self.stages.get(self.schedule.num_stages - 1)
        return self.pipeline.mean_loss([last.mtp.take_loss()] if last is not None and last.mtp is not None else [])


def check_same_text(text: TextData | GivenBatches) -> None:
    """Raise ValueError, on all ranks, unless all ranks have the same text. Collective.

    Every rank reads the text itself and draws the same batches: the first stage takes the inputs, the last stage the
    labels. If a machine has another version of a file, the labels do not match the inputs. The same holds for batches
    that a program makes itself.
    """
    fingerprints = gather_objects(build_on_all_ranks(text.fingerprint))
    others = [rank for rank, other in enumerate(fingerprints) if other != fingerprints[0]]
    if others:
        given = isinstance(text, GivenBatches)
        what = "`batches`" if given else "the texts of --data"
        hint = "pass the sequences of the whole step on every rank" if given else "give every machine the same files"
        differ = (
            f"those of {plural(len(others), 'rank')} ({', '.join(map(str, others[:8]))}) differ from those of rank 0"
        )
        raise ValueError(f"{what} are not the same on all ranks: {differ}; {hint}")


def trusted(config: TrainConfig, numerics: Numerics) -> Numerics:
    """`numerics`, but in plain torch if the Triton kernels compute wrong results on the current GPU.

    Raises ValueError instead if triton was typed, or if CUDA graphs need it.
    """
    if numerics.options.kernels != "triton" or not config.compute.self_test:
        return numerics
    from ..kernels.self_test import SelfTest  # imports triton

    model = config.model
    routing = RoutingOptions(
        model.experts_per_token, model.router_score, model.expert_groups, model.top_groups, model.normalize_weights,
        model.routed_scale, model.group_score,
    )  # fmt: skip
    sizes = model.hidden_size, model.expert_size, model.num_experts
    test = SelfTest(*sizes, routing, torch.device(numerics.device), numerics.dtype)
    if (problem := test.first_difference()) is None:
        return numerics
    if config.compute.kernels == "triton" or config.compute.cuda_graphs:
        raise ValueError(f"--kernels triton: {problem}: use --kernels reference, or --set compute.self_test=false")
    warnings.warn(f"{problem}: this run uses plain torch", stacklevel=2)
    return replace(numerics, options=replace(numerics.options, kernels="reference"))


def peak_flops_of(config: TrainConfig, numerics: Numerics) -> float | None:
    """Peak FLOP/s of this rank's device: as in the options, or of a known GPU. None: unknown."""
    if config.metrics.peak_tflops:
        return config.metrics.peak_tflops * 1e12
    device = torch.device(numerics.device)
    return peak_flops(torch.cuda.get_device_name(device), numerics.dtype) if device.type == "cuda" else None
