"""Routes: the experts of each token, as files that other programs can write and read.

A file in safetensors has, for each layer N with routes:

    layers.N.experts    int16 [samples, positions, K], best first; -1 in the first of a position: not known
    layers.N.samples    int64 [samples], the number of the sample in each row

In training, sample n is the n-th sequence since step 1, from 0: step s starts with sample (s - 1) x batch size. In
`generate`, samples are the texts. A folder has any number of files, whose rows belong together.

N samples, S positions, K experts per token.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..messages import describe, printable


def write_routes(path: Path, layers: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Write a file. layers: by their number, samples [N] and experts [N, S, K]. Raises OSError."""
    tensors = {}
    for layer, (samples_N, experts_NSK) in layers.items():
        tensors[f"layers.{layer}.samples"] = samples_N.cpu().clone()  # layers may share it
        tensors[f"layers.{layer}.experts"] = experts_NSK.to("cpu", torch.int16).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    save_file(tensors, unfinished)
    os.replace(unfinished, path)


class RecordedRoutes:
    """The routes in a file, or in all files of a folder. Raises ValueError for files that cannot be read.

    rows: by layer and sample, the file and the row in it.
    """

    def __init__(self, source: Path):
        self.source, self.rows = source, dict[int, dict[int, tuple[Path, int]]]()
        for file in sorted(source.glob("*.safetensors")) if source.is_dir() else [source]:
            try:
                with safe_open(file, "pt") as tensors:
                    for name in [name for name in tensors.keys() if name.endswith(".samples")]:  # noqa: SIM118
                        numbers = tensors.get_tensor(name).tolist()
                        found = self.rows.setdefault(int(name.split(".")[1]), {})
                        found |= {number: (file, row) for row, number in enumerate(numbers)}
            except (OSError, SafetensorError, ValueError, IndexError) as error:
                raise ValueError(f"cannot read routes from {printable(file)}: {describe(error)}") from None
        if not self.rows:
            raise ValueError(f"{printable(source)} has no routes: name a folder that record_routes wrote, or a file")

    def check(self, layer: int, samples: Sequence[int]) -> None:
        """Raise ValueError unless the layer has routes of all these samples."""
        rows = self.rows.get(layer, {})
        missing = next((number for number in samples if number not in rows), None)
        if missing is not None:
            raise ValueError(f"{printable(self.source)} has no routes of sample {missing} in layer {layer}")

    def read(self, layer: int, samples: Sequence[int], length: int, k: int, num_experts: int) -> Tensor:
        """The experts of these samples, [N, `length`, `k`] in int64; -1 after their last position.

        Raises ValueError for samples that are missing, have more positions or another K, or experts that do not exist.
        """
        self.check(layer, samples)
        routes_NSK = torch.full((len(samples), length, k), -1)
        places = [self.rows[layer][number] for number in samples]
        for file in {file for file, _ in places}:
            with safe_open(file, "pt") as tensors:
                rows = tensors.get_slice(f"layers.{layer}.experts")
                for routes_SK, (other, row) in zip(routes_NSK, places, strict=True):
                    if other != file:
                        continue
                    found_SK = rows[row].long()
                    if found_SK.shape[1] != k or len(found_SK) > length or found_SK.max() >= num_experts:
                        what = f"{[*found_SK.shape]} with experts up to {int(found_SK.max())}"
                        fits = f"[at most {length}, {k}] with experts below {num_experts}"
                        raise ValueError(f"{printable(file)}: the routes of layer {layer} are {what}, not {fits}")
                    routes_SK[: len(found_SK)] = found_SK
        return routes_NSK
