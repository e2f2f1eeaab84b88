"""A training run, from a checked configuration to a saved checkpoint.

`main` is what train.py calls. Everything a user can get wrong is found before the first collective operation, by every
rank for itself and alike, so that it ends in one line and exit code 2, never in a hang.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..checkpoint import SaveError, Saver, SaveResult, list_checkpoints, load_checkpoint, load_weights
from ..data import tokenizer_files
from ..expert_parallel import AllToAll, Local
from ..health.heartbeat import Progress
from ..health.signals import Stop
from ..health.skipped_steps import Skips
from ..health.watch import watching
from ..inference.pipeline import generate, printable
from ..models import StageOptions, TransformerStage, share_embedding, stacked_matrices
from ..overlap import WeightGrads
from ..overlap.labels import GRADIENTS, OPTIMIZER
from ..runtime import P2P, Executor, TensorSpec
from ..runtime.groups import Layout, build_groups, init_world
from ..runtime.launch import Launch
from ..runtime.replicas import check_equal, gradient_norm, replica_sets, sum_gradients
from . import metrics, restart
from .balance import Balance
from .config import parse, resume_command
from .learning_rate import learning_rate
from .optimizer import Optimizer
from .plan import Plan
from .profiling import StepProfiler
from .resolve import resolve


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says. Exits with code 2, after one line on stderr, when it makes no sense."""
    launch = Launch.from_environment()
    arguments = sys.argv[1:] if arguments is None else arguments
    with _one_line_errors(launch):
        config = resolve(parse(arguments, quiet=launch.local_rank > 0), launch)
        plan = Plan.make(config, arguments)
        restart.mark(Path(config.out), launch.local_rank)
    init_world(torch.device(config.device), launch, config.timeout)
    try:
        stop = Stop(announce=launch.rank == 0)
        with stop.on_signals(), watching(config.timeout) as progress:
            with _one_line_errors(launch):
                trainer = Trainer(plan, launch, progress, stop)
            trainer.run()
    finally:
        dist.destroy_process_group()


@contextmanager
def _one_line_errors(launch: Launch) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if launch.local_rank == 0:
            sys.stderr.write(f"train.py: error: {error}\n")  # in one piece: other processes write there, too
        raise SystemExit(2) from None


class Trainer:
    """One rank of a run."""

    def __init__(self, plan: Plan, launch: Launch, progress: Progress | None = None, stop: Stop | None = None):
        self.plan, self.config, self.schedule = plan, plan.config, plan.schedule
        config, model = plan.config, plan.config.model
        self.device = torch.device("cuda", launch.local_rank) if config.device == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.dtype = getattr(torch, config.dtype)
        self.layout = Layout(config.pp, launch.world_size // config.pp, config.ep, launch.rank)
        placement = self.schedule.placement
        self.groups = build_groups(self.layout, placement, config.timeout, shared_embedding=model.mtp_layers > 0)
        self.experts = (
            AllToAll(model.num_experts, self.groups.experts, config.kernels)
            if self.groups.experts
            else Local(model.num_experts, config.kernels)
        )

        options = StageOptions(
            config.seed,
            config.recompute,
            config.kernels,
            config.fused_loss,
            plan.text.tokenizer.end_id if config.document_mask else None,
        )
        self.stages = {
            index: TransformerStage(model, plan.stages[index], self.experts, options).to(self.device, self.dtype)
            for index in placement.stages[self.layout.pp_rank]
        }
        embedding = share_embedding(self.stages.values())
        hidden = TensorSpec((config.micro_batch_size, config.seq_len, model.hidden_size), self.dtype)
        documents = [TensorSpec(hidden.shape[:2], torch.int32)] * config.document_mask
        links = P2P.connect(self.groups.pipeline, [hidden, *documents], self.device, timeout=config.timeout)
        weight_grads = WeightGrads(config.max_deferred or None)
        self.progress = progress or Progress()
        self.executor = Executor(self.stages, links, weight_grads, config.overlap, self.progress.note)

        self.replicas = replica_sets(self.stages.values(), self.groups, embedding)
        self.balance = Balance(model, self.stages, config.bias_rate, self.groups.dense)
        stacked = stacked_matrices(self.stages.values())
        self.optimizer = Optimizer(self.replicas, config.optim, config.zero, stacked)
        self.leader = launch.rank == 0
        self.skips, self.stop, self.stopping = Skips(config.max_skipped, self.leader), stop or Stop(), False
        if plan.resume:
            load_checkpoint(plan.resume, self.state())
            self.optimizer.loaded(plan.first_step - int(self.skips.total))
        elif config.weights:
            load_weights(Path(config.weights), self.state())
            self.optimizer.loaded(0)
        self.folder = Path(config.out)
        self.saver = Saver(
            self.folder, model, config.keep, config.timeout, config.save_async, lambda: self.progress.note("saving")
        )
        self.saved: SaveResult | None = None
        self.metrics = metrics.Metrics(self.folder, self.leader, plan.first_step, config.tensorboard)
        self.utilisation = metrics.utilisation(config, self.device, launch.world_size)
        self.profiler = StepProfiler(
            self.folder / "profile", config.profile, plan.first_step, self.schedule, self.layout, self.device
        )

    # ---- The run ----

    def run(self) -> None:
        """Train, and save. Ends with exit code 1 when the last checkpoint could not be written. Collective."""
        with closing(self.saver):
            self._run()

    def _run(self) -> None:
        config = self.config
        self._introduce()
        self._check_replicas()
        before = self.validation_loss()
        self.metrics.write(step=self.plan.first_step, validation_loss=before)
        self._say(f"validation loss before: {self.plan.text.format_losses(before)}")
        done = self.plan.first_step
        with metrics.progress_bar(config.steps, self.plan.first_step, self.leader) as bar:
            for step in range(self.plan.first_step, config.steps):
                with self.profiler.step(step):
                    record = self.train_step(step)
                self.metrics.write(**record)
                bar.set_postfix_str(f"loss {record['loss']:.3f}, {record['tokens_per_s']:,.0f} tokens/s", refresh=False)
                bar.update()
                done = step + 1
                if config.check_replicas_every and done % config.check_replicas_every == 0:
                    self._check_replicas()
                if self.stopping or done == config.steps or (config.save_every and done % config.save_every == 0):
                    self.start_save(done)
                self._tell(self.saver.poll())
                if self.stopping:
                    break
        if done < config.steps:
            self._stopped(done)
        else:
            self._finish(before)
        self.metrics.close()

    def _finish(self, before: float) -> None:
        config = self.config
        self._check_replicas()
        after = self.validation_loss()
        self.metrics.write(step=config.steps, validation_loss=after)
        if profile := self.profiler.report():
            self._say(profile)
        self._say(f"peak memory: {self._largest(metrics.peak_memory_mb(self.device)):,.0f} MB on the fullest rank")
        if config.sample_tokens:
            self._say(f"sample:\n{self._indented(config.prompt + self.sample())}")
        saved = self._last_saved()
        self._say(f"saved {saved}")
        self._say(f"to resume: {self._resume_command(saved, 2 * config.steps)}")
        self._say(f"validation loss {self.plan.text.format_losses(before, after)}")

    def train_step(self, step: int) -> dict[str, float]:
        """One update; returns what the metrics record of it. Collective."""
        config, layout = self.config, self.layout
        self.progress.step = step + 1
        start = time.perf_counter()
        count = config.micro_batches * config.micro_batch_size
        batch = self.plan.text.batch(config.seed, step, layout.dp_rank, count, config.seq_len)
        losses = self._pipeline_step(*batch)
        mean = 1 / (config.micro_batches * layout.dp)  # the micro-batches' losses are averaged, not summed
        with record_function(GRADIENTS):
            for replicas in self.replicas:
                sum_gradients(replicas)
            norm = gradient_norm(self.replicas, self.device) * mean
        clip = config.optim.clip
        lr = learning_rate(config.optim, step, config.steps)
        # The host waits for the device here, before the update and not after it; the next step begins without a wait.
        load_LE = self.balance.loads(self.device)
        loss, norm_value = self._mean(losses), norm.item()
        ahead = {"mtp_loss": self._mtp_loss()} if config.model.mtp_layers else {}
        finite = self.skips.finite(step + 1, loss, norm_value)
        balance = self.balance.after_step(load_LE, self.device, move=finite)
        with record_function(OPTIMIZER):
            if finite:
                self.optimizer.step(lr, mean * (clip / norm.clamp(min=clip) if clip else 1.0))
            else:
                self.optimizer.drop_gradients()
        seconds = time.perf_counter() - start
        tokens = count * layout.dp * config.seq_len
        mfu = {"mfu": round(self.utilisation * tokens / seconds, 4)} if self.utilisation else {}
        return {
            "step": step + 1, "loss": loss, "grad_norm": norm_value, "lr": lr, "skipped": int(self.skips.total),
            "seconds": round(seconds, 4), "tokens": tokens, "tokens_per_s": round(tokens / seconds, 1), **mfu,
            "peak_memory_mb": round(metrics.peak_memory_mb(self.device), 1), **metrics.load_statistics(load_LE),
            **ahead, **balance,
        }  # fmt: skip

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss over the held-out sequences, in nats per token; the same on all ranks. Collective."""
        config, layout = self.config, self.layout
        count = config.micro_batches * config.micro_batch_size
        batches = -(-config.eval_sequences // (count * layout.dp))
        losses: list[Tensor] = []
        for i in range(batches):
            first = (i * layout.dp + layout.dp_rank) * count
            total = batches * layout.dp * count
            losses += self._pipeline_step(*self.plan.text.held_out_batch(first, count, total, config.seq_len))
        return self._mean(losses)

    def sample(self) -> str:
        """A text that the model continues from the prompt. Collective."""
        config, model, tokenizer = self.config, self.config.model, self.plan.text.tokenizer
        prompt = torch.tensor(tokenizer.encode(config.prompt or "\n"))
        tokens = generate(
            self.executor, self.schedule.placement, self.groups.pipeline, [prompt], config.sample_tokens,
            (model.hidden_size, self.dtype), config.seq_len, model.vocab_size, config.sampling(), config.seed,
        )  # fmt: skip
        return tokenizer.decode(tokens[0].tolist())

    def start_save(self, step: int) -> None:
        """Begin to write a checkpoint after `step` updates, when the one before is written. Collective."""
        if self.saver.busy:
            self._say(f"step {step}: waiting for the last checkpoint, which is still being written")
        self._tell(self.saver.wait())
        self.saver.start(step, self.state(), tokenizer_files(self.plan.text.tokenizer))

    def save(self, step: int) -> Path:
        """Write a checkpoint after `step` updates. Raises SaveError if that fails. Collective."""
        self.start_save(step)
        self._tell(saved := self.saver.wait())
        assert saved is not None
        if saved.error:
            raise SaveError(saved.error)
        return saved.path

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint holds of this rank, by global names; loading into it loads the run."""
        return self.optimizer.tensors() | self.balance.state() | {"skipped": self.skips.total}

    # ---- Parts ----

    def _pipeline_step(self, inputs_BS: Tensor, labels_BS: Tensor) -> list[Tensor]:
        """Run the schedule on one batch; the losses of the micro-batches that end on this rank."""
        schedule, own = self.schedule, self.layout.pp_rank
        inputs, labels = {}, {}
        size = self.config.micro_batch_size
        for m, (x, y) in enumerate(zip(inputs_BS.split(size), labels_BS.split(size), strict=True)):
            if schedule.rank_of(0, m) == own:
                inputs[m] = (x.to(self.device),)
            if schedule.rank_of(schedule.num_stages - 1, m) == own:
                labels[m] = (y.to(self.device),)
        last = self.stages.get(schedule.num_stages - 1)
        criterion = last.loss if last is not None else None
        losses = list(self.executor.step(schedule, inputs, labels, criterion).losses.values())
        self.progress.note(None)
        return losses

    def _mean(self, losses: list[Tensor]) -> float:
        """The mean over all ranks' losses; on the way, they agree on whether one of them was asked to stop."""
        total = torch.zeros(3, dtype=torch.float64, device=self.device)
        if losses:
            total[0], total[1] = torch.stack(losses).double().sum(), len(losses)
        total[2] = self.stop.requested
        dist.all_reduce(total)
        loss, count, asked = total.tolist()
        self.stopping = asked > 0
        return loss / count

    def _mtp_loss(self) -> float:
        """The mean loss further ahead in this step, which the loss does not show, over all ranks."""
        last = self.stages.get(self.schedule.num_stages - 1)
        return self._mean([last.mtp.take_loss()] if last is not None and last.mtp is not None else [])

    def _largest(self, value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def _check_replicas(self) -> None:
        for replicas in (*self.replicas, self.balance.replicas):
            check_equal(replicas)

    # ---- Words ----

    def _stopped(self, step: int) -> None:
        saved = self._last_saved()
        resume = self._resume_command(saved, self.config.steps)
        self._say(f"stopped after step {step}, saved {saved}, to resume: {resume}")

    def _resume_command(self, saved: Path, steps: int) -> str:
        """Names the checkpoint itself where later ones, which a run resumed from the middle leaves, would be taken."""
        run = str(saved) if saved in list_checkpoints(saved.parent)[1:] else self.config.out
        return resume_command(self.plan.arguments, run, steps)

    def _last_saved(self) -> Path:
        """The checkpoint that was begun last, when it is written. Ends the run with exit code 1 if that failed."""
        self._tell(self.saver.wait())
        if self.saved is None:  # there was nothing left to do
            assert self.plan.resume is not None
            return self.plan.resume
        if self.saved.error:
            self.metrics.close()
            raise SystemExit(1)  # `_tell` has said why
        return self.saved.path

    def _say(self, text: str) -> None:
        if self.leader:
            print(text, flush=True)

    @staticmethod
    def _indented(text: str) -> str:
        return "\n".join(f"    | {line}" for line in printable(text).split("\n"))

    def _tell(self, saved: SaveResult | None) -> None:
        """Take note of how a save ended; a failure is for everyone to see."""
        self.saved = saved or self.saved
        if saved and saved.error and self.leader:
            sys.stderr.write(f"\ntrain.py: error: {saved.path} could not be written: {saved.error}\n")
            self.metrics.write(step=saved.step, save_error=saved.error)

    def _introduce(self) -> None:
        shares = torch.zeros(2, dtype=torch.float64, device=self.device)
        for replicas in self.replicas:
            number = sum(p.numel() for p in replicas.parameters.values())
            shares[int(replicas.local_experts is not None)] += number / replicas.num_replicas
        dist.all_reduce(shares)
        dense, experts = shares.tolist()
        state = self._largest(self.optimizer.state_bytes / 2**20)
        self._say(self.plan.introduction(self.layout, dense, experts, state))
