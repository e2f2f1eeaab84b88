"""The checkpoints of a run, and the export at its end. All ranks write parts of them."""

from contextlib import closing
from pathlib import Path

from ..checkpoint import Saver, SaveResult, find_checkpoint
from ..checkpoint.expert_loads import loads_file
from ..checkpoint.huggingface import companion_files, fp8_file, plan_adapter_export, plan_checkpoint_export
from ..checkpoint.weights import SavedAdapters
from ..data import stores, tokenizer_files
from ..health.heartbeat import SAVING
from ..messages import printable
from .console import Console, RunFailed
from .inputs import inputs_file
from .step import Trainer


class Saving:
    """Starts saves and reports their results. A run without a folder saves nothing. Collective."""

    def __init__(self, trainer: Trainer, console: Console):
        self.trainer, self.console, self.saver = trainer, console, None
        self.last: SaveResult | None = None
        run, options = trainer.run, trainer.config.checkpoint
        if run.folder:
            self.inputs = inputs_file(trainer.config, trainer.text)  # what this run has read, even if a file changes
            # While a save runs, a callback may be in another working directory; a command has no callbacks.
            folder = run.folder if run.start.from_command else run.folder.absolute()
            # Retries, and then the last attempt, end before the run counts as hanging.
            timeout = trainer.config.health.timeout
            patience = stores.Patience(timeout / 2, min(timeout / 4, 60.0))
            self.saver = Saver(
                folder, trainer.config.model, options.keep or 0, options.save_async, trainer.progress.note_save,
                patience,
            )  # fmt: skip

    def start(self, step: int) -> None:
        """Wait until the previous checkpoint is written, then start to write the one of `step`.

        Only one replica of each parameter is saved, so all are compared first.
        """
        trainer = self.trainer
        trainer.check_replicas()
        self.console.write_steps()
        if self.saver is None:
            return
        if self.saver.busy:
            self.console.say(f"step {step}: waiting for the previous checkpoint to be written")
        with trainer.progress.during(SAVING):
            self._note(self.saver.wait())
            files = tokenizer_files(trainer.text.tokenizer) | companion_files(trainer.run.start.companions)
            compute = trainer.config.compute
            files |= fp8_file(None if compute.fp8 == "off" else compute.fp8_recipe)
            if (lora := trainer.config.lora).rank:
                files |= SavedAdapters(lora, trainer.config.checkpoint.weights).file()
            self.saver.start(step, trainer.state(), files | self.inputs | loads_file(*trainer.balance.take_loads()))

    def poll(self, wait: bool = False) -> None:
        """Report the last save if it has ended. wait: block until a running save has ended."""
        if self.saver:
            with self.trainer.progress.during(SAVING):
                self._note(self.saver.wait() if wait else self.saver.poll())

    def keep_all(self) -> None:
        """Remove no earlier checkpoint from now on."""
        if self.saver:
            self.saver.keep = 0

    def finished(self) -> Path | None:
        """Wait for the last save and return its folder; None without a folder. Raises RunFailed if it failed."""
        if self.saver is None:
            return None
        self.poll(wait=True)
        if self.last is None:  # a restart after the last step
            return self.trainer.run.start.resume
        if self.last.error:
            raise RunFailed(f"{printable(self.last.path)} could not be written: {self.last.error}")  # reported already
        return self.last.path

    def export(self, checkpoint: Path) -> None:
        """Write the model of a checkpoint in Hugging Face's format, if --export names a folder."""
        options = self.trainer.config.checkpoint
        if not (folder := options.export):
            return
        try:
            with self.trainer.progress.during(SAVING):
                if stores.url_of(checkpoint) is not None:  # its local files were removed after the upload
                    checkpoint = find_checkpoint(str(checkpoint))
                adapter = self.trainer.config.lora.export == "adapter"
                plan = (plan_adapter_export if adapter else plan_checkpoint_export)(checkpoint)
                plan.write(stores.output_folder(folder, options.staging))
                lost = plan.describe_loss()
        except (ValueError, OSError) as error:
            self.console.fail(f"--export {printable(folder)}: {error}")
        model_type, size = plan.layout.architecture.model_type, sum(plan.sizes.values()) / 1e6
        self.console.say(f"exported {printable(folder)}: {'an adapter for ' * adapter}{model_type}, {size:,.1f} MB")
        if lost:
            self.console.say(lost)

    def close(self) -> None:
        """Finish the last save."""
        if self.saver:
            with self.trainer.progress.during(SAVING), closing(self.saver):
                pass

    def _note(self, result: SaveResult | None) -> None:
        if result:
            self.last = result
            self.console.saved(result)
