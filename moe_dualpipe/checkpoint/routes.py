"""Routes: the experts of each token, as files that other programs can write and read.

A file in safetensors has, for each layer N with routes:

    layers.N.experts    integers [samples, positions, K], best first; -1 in the first of a position: not known
    layers.N.samples    integers [samples], the number of the sample in each row

In training, sample n is the n-th sequence since step 1, from 0: step s starts with sample (s - 1) x batch size. In
`generate`, samples are the texts. A folder has any number of files, whose rows belong together: a sample is in one of
them. `run` in the metadata of a file says, as JSON, what its numbers depend on, such as the text and the batch size. So
the routes of another run are refused. Files of other programs have no `run`.

N samples, S positions, K experts per token.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..data.files import replacing
from ..data.strict_json import parse, reading
from ..errors import without_frames
from ..messages import describe, printable, quoted
from .tensor_file import TensorEntry, read_entry, read_header, read_metadata, write_tensors

SUFFIX = ".safetensors"
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_NAME = re.compile(r"layers\.(\d{1,6})\.(experts|samples)")


def write_routes(path: Path, layers: Mapping[int, tuple[Tensor, Tensor]], run: Mapping[str, Any]) -> None:
    """Write a file. layers: by their number, samples [N] and experts [N, S, K]. run: what the numbers depend on.

    Raises ValueError, and leaves no file, if it cannot be written.
    """
    tensors = {}
    for layer, (samples_N, experts_NSK) in layers.items():
        tensors[f"layers.{layer}.samples"] = samples_N
        tensors[f"layers.{layer}.experts"] = experts_NSK.to(torch.int16)
    try:
        with replacing(path, "unfinished") as part:
            write_tensors(part, tensors, metadata={"run": json.dumps(run)})
    except OSError as error:
        raise without_frames(
            ValueError(f"cannot write {printable(path)}: {error.strerror or describe(error)}")
        ) from None


def run_of_file(path: Path) -> dict[str, Any]:
    """What the numbers in a file depend on; {} if it does not say so. Raises ValueError."""
    with reading(path):
        return msgspec.convert(parse(read_metadata(path).get("run", "{}")), dict)


def check_same_run(path: Path, found: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raise ValueError if a file with the routes of the run `found` cannot be one of `run`."""
    others = [name for name in found if name in run and found[name] != run[name]]
    if others:
        differences = ", ".join(f"{printable(name)} {quoted(found[name], 60)}, not {run[name]!r}" for name in others)
        raise ValueError(f"{printable(path)} has the routes of another run: {differences}")


class RecordedRoutes:
    """The routes in a file, or in all files of a folder.

    run: of the routes that are wanted, with the K and the number of the experts. rows: by layer and sample, the
    tensor of the experts and the row in it. files, bytes: of all routes.

    Raises ValueError for files that cannot be read, of other runs, or of other shapes, and for a sample in two of them.
    """

    def __init__(self, source: Path, run: Mapping[str, Any]):
        self.source, self.bytes, self.rows = source, 0, dict[int, dict[int, tuple[TensorEntry, int]]]()
        self._k, self._num_experts, known = run["experts_per_token"], run["num_experts"], dict(run)
        self.files = sorted(source.glob(f"*{SUFFIX}")) if source.is_dir() else [source]
        for file in self.files:
            entries = read_header(file)
            found = run_of_file(file)
            check_same_run(file, found, known)
            known |= found
            for layer in {int(match[1]) for name in entries if (match := _NAME.fullmatch(name))}:
                self._add(file, layer, entries)
        if not self.rows:
            raise ValueError(f"{printable(source)} has no routes: name a folder that record_routes wrote, or a file")

    def _add(self, file: Path, layer: int, entries: Mapping[str, TensorEntry]) -> None:
        """Note the rows of a layer in a file."""
        samples, experts = (entries.get(f"layers.{layer}.{kind}") for kind in ("samples", "experts"))
        if not (
            experts and samples and {experts.dtype, samples.dtype} <= _INTEGERS and len(experts.shape) == 3
            and experts.shape == (*samples.shape, experts.shape[1], self._k)
        ):  # fmt: skip
            found = [f"{one.dtype} {[*one.shape]}" if one else "nothing" for one in (experts, samples)]
            raise ValueError(
                f"{printable(file)} needs layers.{layer}.experts [samples, positions, {self._k}] and .samples "
                f"[samples], both integers: got {' and '.join(found)}"
            )
        self.bytes += experts.nbytes
        rows = self.rows.setdefault(layer, {})
        for row, number in enumerate(read_entry(samples).tolist()):
            if number in rows:
                raise ValueError(
                    f"{printable(file)}: sample {number} of layer {layer} is also in "
                    f"{printable(rows[number][0].file)}: remove the files of another run"
                )
            rows[number] = experts, row

    def check(self, layer: int, samples: Sequence[int]) -> None:
        """Raise ValueError unless the layer has routes of all these samples."""
        rows = self.rows.get(layer, {})
        missing = next((number for number in samples if number not in rows), None)
        if missing is not None:
            raise ValueError(f"{printable(self.source)} has no routes of sample {missing} in layer {layer}")

    def read(self, layer: int, samples: Sequence[int], length: int) -> Tensor:
        """The experts of these samples, [N, `length`, K] in int64; -1 after their last position.

        Raises ValueError for samples that are missing or have more positions, and for experts that do not exist or that
        a position has twice.
        """
        self.check(layer, samples)
        routes_NSK = torch.full((len(samples), length, self._k), -1)
        for routes_SK, number in zip(routes_NSK, samples, strict=True):
            whole, row = self.rows[layer][number]
            size = whole.nbytes // whole.shape[0]
            found_SK = read_entry(replace(whole, shape=whole.shape[1:], start=whole.start + row * size)).long()
            known_SK = found_SK[found_SK[:, 0] != -1]
            valid = bool(((known_SK >= 0) & (known_SK < self._num_experts)).all())
            if not valid or len(found_SK) > length or (known_SK.sort(1).values.diff(dim=1) == 0).any():
                raise without_frames(ValueError(
                    f"{printable(whole.file)}: sample {number} of layer {layer} needs at most {length} positions, each "
                    f"with {self._k} different experts below {self._num_experts}, or -1 first: got {len(found_SK)} "
                    f"positions, with experts from {int(found_SK.min())} to {int(found_SK.max())}"
                ))  # fmt: skip
            routes_SK[: len(found_SK)] = found_SK
        return routes_NSK
