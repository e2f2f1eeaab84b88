"""`moe-dualpipe profile`: analyze the overlap in a recorded trace, or measure it on this machine."""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional, arg, subcommand

from ..data import strict_json
from ..messages import check_range, printable
from ..option_types import PresetName
from ..tools.drawing.output import check_output, make_folder
from .profile_compare import ProfileCompare

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ProfileAnalyze:
    """Analyze traces of torch.profiler or Nsight Systems: how much communication was hidden, and why not more.

    Several traces are analyzed one by one, and then compared.
    """

    traces: Positional[Annotated[list[Path], arg(metavar="TRACE [TRACE ...]")]]
    """Chrome traces (.json, .json.gz), exports of Nsight Systems (.sqlite), folders, or patterns ("run/*.json")."""
    comm: Annotated[str | None, arg(aliases=["--comm-pattern"])] = None
    """Regular expression. Kernels (on a CPU, annotations) whose names contain it are communication, too."""
    compute: str | None = None
    """Regular expression. Kernels whose names contain it are computation, whatever --comm or their library says."""
    phases: bool = False
    """Print a table of the annotations and modules that launched work."""
    streams: bool = False
    """Print the busy time of each stream (on a CPU, of each thread)."""
    collectives: bool = False
    """Print a table of collectives by kind and group: count, bytes, bandwidth, and where they were launched."""
    steps: str | None = None
    """Steps to analyze: 3:7 (without step 7), 3:, :7 or 3. all: everything. None: all steps without start-up."""
    kernels: int = 0
    """Print a table of this many kernels (on a CPU, operators) with the longest total time."""
    out: Path | None = None
    """Draw computation above communication into this file: a picture (.png, .svg) or a page to zoom into (.html)."""
    json: bool = False
    """Print JSON: one object for one device, a list of objects for several."""

    def run(self) -> None:
        from ..tools.profiler import Names
        from ..tools.profiler.files import analyze_files
        from ..tools.profiler.pictures.lanes import SUFFIXES, save_lanes, trace_pictures
        from ..tools.profiler.reading.chrome import MOST_EVENTS
        from ..tools.profiler.reading.paths import trace_paths
        from ..tools.profiler.reports.overlap import traces_text
        from ..tools.profiler.windows import parse_steps

        try:
            names = Names(self.comm, self.compute)
        except ValueError as error:
            raise ValueError(f"--{error}") from None
        check_range("--kernels", self.kernels, 0)
        if not self.traces:
            raise ValueError("no trace to analyze: name at least one file")
        if self.out is not None:
            check_output(self.out, SUFFIXES)
        steps = parse_steps(self.steps)
        found = analyze_files(trace_paths(self.traces), names, self.out is not None, steps)
        for file, events in found.truncated.items():
            what = "the file is cut off" if events < MOST_EVENTS else "the file is too long"
            print(f"{printable(file)}: {what}: only the first {events:,} events are analyzed", file=sys.stderr)
        for file, sentences in found.remarks.items():
            print(f"{printable(file)}: {'; '.join(sentences)}", file=sys.stderr)
        if self.out is not None:
            save_lanes(trace_pictures(found), self.out)
        if self.json:
            objects = found.as_objects()
            print(strict_json.write(objects[0] if len(objects) == 1 else objects, indent=1))
        else:
            print(traces_text(found, self.phases, self.kernels, self.streams, self.collectives))


@dataclass(frozen=True)
class ProfileRun:
    """Run two chunks in sequence and overlapped on this machine, record both runs, and compare them.

    A single process acts as one of --ep ranks and sends over a modelled link. Under torchrun, the ranks are real:

    $ torchrun --nproc-per-node 2 -m moe_dualpipe.cli profile run
    """

    mode: Literal["train", "prefill", "decode"] = "train"
    """train: a forward and a backward. prefill: two forwards. decode: two forwards of one new token per sequence."""
    preset: PresetName = "tiny"
    """Size of the model. Only its MoE layers are used, without embedding and head."""
    layers: int = 4
    """Number of MoE layers."""
    ep: int | None = None
    """Number of expert-parallel ranks. None: the largest number up to 64 that divides the experts evenly."""
    seq: int | None = None
    """Tokens per sequence; in decode, cached tokens per sequence. None: 1024 on a CPU, 4096 on a GPU."""
    tokens: int | None = None
    """Tokens per micro-batch; in decode, sequences. None: 4096, or --seq if that does not divide 4096; decode: 128."""
    routing: Literal["balanced", "real"] = "balanced"
    """balanced: every expert gets the same number of tokens. real: what the untrained router chooses."""
    link_gbps: float | None = None
    """Gb/s of the modelled link per direction. None: 400; on a CPU, communication takes 0.7 of the computation time."""
    link_latency_us: float = 0.0
    """Latency of each transfer over the modelled link, in microseconds. Needs --link-gbps."""
    replay: Literal["none", "deepseek"] = "none"
    """deepseek: each transfer takes as long as in DeepSeek's published training trace."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on. auto: a GPU if there is one."""
    out: Path | None = None
    """Folder for the recordings, report.json and timelines. None: runs/profile-<mode>."""
    json: bool = False
    """Print JSON: one object with `sequential`, `overlapped` and `bound_us`."""

    def run(self) -> None:
        gbps = self.link_gbps or None  # 0 also means None, here and below
        if gbps is not None:
            check_range("--link-gbps", gbps, 1e-3, 1e6)
        check_range("--link-latency-us", self.link_latency_us, 0, 1e6)
        if self.ep is not None:
            check_range("--ep", self.ep, 0)
        if self.link_latency_us and gbps is None:
            raise ValueError("--link-latency-us needs --link-gbps")
        if gbps is not None and self.replay != "none":
            raise ValueError("--replay sets the transfer times: leave out --link-gbps and --link-latency-us")
        out = self.out or Path("runs") / f"profile-{self.mode}"
        make_folder(out)

        from ..expert_parallel import Link
        from ..tools.profiler.measure import measure
        from ..tools.profiler.pair import Workload
        from ..tools.profiler.pictures.lanes import measurement_pictures, save_lanes
        from ..tools.profiler.reports.overlap import measurement_text

        link = None if gbps is None else Link(gbps / 8, self.link_latency_us)
        sizes = self.layers, self.seq or None, self.tokens or None
        try:
            workload = Workload.from_preset(self.mode, self.preset, *sizes, self.routing, _device(self.device))
            measurement = measure(workload, out, self.ep or None, link, self.replay == "deepseek")
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            raise ValueError(f"out of memory: {str(error).splitlines()[0]}") from None
        if os.environ.get("RANK", "0") != "0":
            return
        text = strict_json.write(measurement.as_object(), indent=1)
        (out / "report.json").write_text(text + "\n")
        files = [*measurement.recordings, "report.json"]
        for name in ("timeline.html", "timeline.png"):
            with suppress(ImportError):  # without matplotlib, there is no .png
                save_lanes(measurement_pictures(measurement), out / name)
                files.append(name)
        print(
            text if self.json else f"{measurement_text(measurement)}\n\nin {printable(out)}: {', '.join(sorted(files))}"
        )


def _device(wanted: str) -> "torch.device":
    """The device of this process, also under torchrun."""
    import torch

    from ..runtime.launch import choose_device, count_gpus

    rank, processes = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    kind = choose_device(wanted, count_gpus(), processes or 1)
    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)


@dataclass(frozen=True)
class ProfileCommands:
    """Show how much communication is hidden behind computation."""

    command: Annotated[
        Annotated[ProfileAnalyze, subcommand("analyze")]
        | Annotated[ProfileCompare, subcommand("compare")]
        | Annotated[ProfileRun, subcommand("run")],
        tyro.conf.arg(name=""),
    ]
