"""`moe-dualpipe profile`: what a trace says of the overlap, and a measurement here and now."""

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional, subcommand

from ..drawing.output import check_output, make_folder

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ProfileAnalyze:
    """How much communication was hidden, in a trace that torch.profiler wrote of work on a GPU, or on a CPU."""

    traces: Positional[list[Path]]
    """Chrome traces, .json or .json.gz; of several, each is analyzed, and they are compared."""
    comm_pattern: str | None = None
    """What the name of a communication kernel contains (a regular expression); on a CPU, of an annotation. None: the
    usual libraries'."""
    phases: bool = False
    """A table of the annotations in which work was launched."""
    streams: bool = False
    """A table of the streams, on a CPU threads."""
    kernels: int = 0
    """A table of so many kernels, on a CPU operators: those that took the most time."""
    out: Path | None = None
    """Draw computation above communication into this file (.png, .svg, .html)."""
    json: bool = False
    """Print JSON: an object for one device of one trace, a list of them for more."""

    def run(self) -> None:
        from ..drawing.lanes import SUFFIXES, save_lanes, trace_pictures
        from ..drawing.overlap_report import traces_text
        from ..profiler import COMMUNICATION
        from ..profiler.files import analyze_files
        from ..profiler.trace import MOST_EVENTS

        try:
            pattern = COMMUNICATION if self.comm_pattern is None else re.compile(self.comm_pattern)
        except re.error as error:
            raise ValueError(f"--comm-pattern {self.comm_pattern!r} is no regular expression: {error}") from None
        if self.kernels < 0:
            raise ValueError(f"--kernels cannot be negative: got {self.kernels}")
        if not self.traces:
            raise ValueError("no trace to analyze: name at least one file")
        if self.out is not None:
            check_output(self.out, SUFFIXES)
        found = analyze_files(self.traces, pattern, pictures=self.out is not None)
        for file, events in found.truncated.items():
            what = "cut off" if events < MOST_EVENTS else "too long: read no further"
            print(f"{file}: {what} after {events:,} events; this is about those", file=sys.stderr)
        if self.out is not None:
            save_lanes(trace_pictures(found), self.out)
        if self.json:
            objects = found.as_objects()
            print(json.dumps(objects[0] if len(objects) == 1 else objects, indent=1))
        else:
            print(traces_text(found, self.phases, self.kernels, self.streams))


@dataclass(frozen=True)
class ProfileRun:
    """Measure the overlap of a pair of chunks: interleaved, and the same work in sequence, recorded and analyzed.

    One process plays one of many ranks over a modelled link; under torchrun the ranks are real:

    $ torchrun --nproc-per-node 2 -m moe_dualpipe.cli profile run
    """

    mode: Literal["train", "prefill", "decode"] = "train"
    """train: a forward with a backward. prefill: two forwards of whole sequences. decode: two of one token a sequence,
    behind cached ones."""
    preset: str = "tiny"
    """Model size; its blocks with experts are used, without embedding and head."""
    layers: int = 4
    """How many such blocks."""
    ep: int = 0
    """Ranks over which the experts are spread. 0: up to 64."""
    seq: int = 0
    """Tokens in a sequence; in decode, those that are cached. 0: 1024 on a CPU, 4096 on a GPU."""
    tokens: int = 0
    """Tokens in a micro-batch; in decode, one of each sequence. 0: 4096 if that is whole sequences, else one; in
    decode 128."""
    routing: Literal["balanced", "real"] = "balanced"
    """balanced: every expert gets as many tokens. real: what the router says, untrained."""
    link_gbps: float = 0.0
    """Bandwidth of the modelled link, in gigabits a second each way. 0: on a CPU, such that communication takes 0.7 of
    the time that is computed; on a GPU 400."""
    link_latency_us: float = 0.0
    """Latency of each of its transfers, with --link-gbps."""
    replay: Literal["none", "deepseek"] = "none"
    """deepseek: transfers take what they took in DeepSeek's published training trace."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    out: Path | None = None
    """Folder for the recordings, report.json and timelines. None: runs/profile-<mode>."""
    json: bool = False
    """Print JSON: one object with `sequential`, `overlapped` and `bound_us`."""

    def run(self) -> None:
        if self.link_gbps < 0 or self.link_latency_us < 0:
            raise ValueError(
                f"a link cannot have negative numbers: got {self.link_gbps} Gb/s, {self.link_latency_us} us of latency"
            )
        if self.link_latency_us and not self.link_gbps:
            raise ValueError("--link-latency-us belongs to a link of a given bandwidth: add --link-gbps")
        if self.link_gbps and self.replay != "none":
            raise ValueError("--replay brings the times of its own link: leave out --link-gbps and --link-latency-us")
        out = self.out or Path("runs") / f"profile-{self.mode}"
        make_folder(out)

        from ..drawing.lanes import save_measurement
        from ..drawing.overlap_report import measurement_text
        from ..expert_parallel import Link
        from ..profiler.measure import measure
        from ..profiler.pair import Workload

        link = Link(self.link_gbps / 8, self.link_latency_us) if self.link_gbps else None
        try:
            device = _device(self.device)
            work = Workload.from_preset(
                self.mode, self.preset, self.layers, self.seq, self.tokens, self.routing, device
            )
            measured = measure(work, out, self.ep, link, self.replay == "deepseek")
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            raise ValueError(f"that needs more memory than there is: {str(error).splitlines()[0]}") from None
        if os.environ.get("RANK", "0") != "0":
            return
        text = json.dumps(measured.as_object(), indent=1)
        (out / "report.json").write_text(text + "\n")
        written = sorted([*measured.recordings, "report.json", *save_measurement(measured, out)])
        print(text if self.json else f"{measurement_text(measured)}\n\nin {out}: {', '.join(written)}")


def _device(wanted: str) -> "torch.device":
    """The device of this process, of those that torchrun may have started."""
    import torch

    from ..runtime.launch import choose_device

    number = {name: int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    kind = choose_device(wanted, torch.cuda.device_count(), number["LOCAL_WORLD_SIZE"] or 1)
    return torch.device(kind, number["LOCAL_RANK"]) if kind == "cuda" else torch.device(kind)


@dataclass(frozen=True)
class ProfileCommands:
    """What a profiler's trace says about the overlap, and a measurement of it."""

    command: Annotated[
        Annotated[ProfileAnalyze, subcommand("analyze")] | Annotated[ProfileRun, subcommand("run")],
        tyro.conf.arg(name=""),
    ]
