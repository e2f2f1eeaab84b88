"""What a run reads that its options only name: the text, files with custom layers, and a schedule file.

Each checkpoint has a checksum of these, so a resumed run can say which of them is another one now.
"""

import json
from hashlib import blake2b
from pathlib import Path

from ..data import GivenBatches, TextData
from ..data.strict_json import read_if_there
from ..schedule.schedule_file import is_file_name
from .config import TrainConfig

FILE = "inputs.json"


def checksums(config: TrainConfig, text: TextData | GivenBatches) -> dict[str, str]:
    """The checksum of each input, by its name in messages."""
    named = {f"--{layer}": str(getattr(config.model, layer)) for layer in config.model.own_layers}
    files = {option: name.rpartition(":")[0] for option, name in named.items()}
    if is_file_name(config.parallel.schedule):
        files["--schedule"] = config.parallel.schedule
    found = {
        f"the file of {option}": blake2b(Path(name).read_bytes(), digest_size=8).hexdigest()
        for option, name in files.items()
        if Path(name).is_file()
    }
    if isinstance(text, TextData):  # given batches depend on the step
        found["the text of --data"] = f"{text.fingerprint():x}"
    return found


def inputs_file(config: TrainConfig, text: TextData | GivenBatches) -> dict[str, bytes]:
    """The file of a checkpoint, by its name."""
    return {FILE: json.dumps(checksums(config, text)).encode()}


def changed_inputs(checkpoint: Path, config: TrainConfig, text: TextData | GivenBatches) -> list[str]:
    """What a resumed run reads that has changed since its checkpoint, one text each."""
    saved, now = read_if_there(checkpoint / FILE, dict) or {}, checksums(config, text)
    changed = [name for name in now if name in saved and now[name] != saved[name]]
    return [f"{name}, which is not what it was when the checkpoint was written" for name in changed]
