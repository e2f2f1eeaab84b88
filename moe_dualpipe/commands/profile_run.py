"""`moe-dualpipe profile run`: measure the overlap on this machine."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ..command_line import one_of
from ..data import strict_json
from ..data.files import make_folder
from ..expert_parallel import Link
from ..kernels.options import Fp8
from ..messages import printable
from ..models import PRESETS
from ..runtime.launch import Launch, device_of
from ..tools.profiler.measure import measure
from ..tools.profiler.pair import PairWorkload
from ..tools.profiler.pictures.lanes import save_lanes
from .options import DeviceOption, JsonOption, check_ranges


@dataclass(frozen=True)
class ProfileRun(DeviceOption, JsonOption):
    """Run two chunks in sequence and overlapped on this machine, record both runs, and compare them.

    The process acts as one of --ep ranks and sends over a modeled link. For real ranks, use train.py --profile.
    """

    mode: Literal["train", "prefill", "decode"] = "train"
    """train: a forward and a backward. prefill: two forwards. decode: two forwards of one new token per sequence."""
    preset: Annotated[str, one_of(*PRESETS)] = "tiny"
    """Size of the model. Only its MoE layers are used, without embedding and head."""
    num_layers: int = 4
    """Number of MoE layers."""
    ep: int | None = None
    """Number of expert-parallel ranks. None: the largest number up to 64 that divides the experts evenly."""
    cp: int = 1
    """Number of ranks that share each sequence, on a CPU: keys are gathered over the same link."""
    seq_len: int | None = None
    """Tokens per sequence; in decode, cached tokens per sequence. None: 1024 on a CPU, 4096 on a GPU."""
    tokens: int | None = None
    """Tokens per micro-batch; in decode, sequences. None: 4096, or --seq-len if it does not divide it; decode: 128."""
    routing: Literal["balanced", "real"] = "balanced"
    """balanced: every expert gets the same number of tokens. real: what the untrained router chooses."""
    fp8: Fp8 = "off"
    """compute.fp8 of train.py. experts: their products in 8 bits. experts+dispatch: also the rows that they get."""
    link_gbps: float | None = None
    """Gb/s of the modeled link per direction. None: 400; on a CPU, communication takes half of the computation time."""
    link_latency_us: float = 0.0
    """Latency of each transfer over the modeled link, in microseconds. Needs --link-gbps."""
    replay: Literal["none", "deepseek"] = "none"
    """deepseek: each transfer takes as long as in DeepSeek's published training trace."""
    out: Path | None = None
    """Folder for the recordings, report.json and timelines. None: runs/profile-<mode>."""

    def run(self) -> None:
        gbps = self.link_gbps or None  # 0 also means None, here and below
        if gbps is not None:
            check_ranges(self, 1e-3, "link_gbps", high=1e6)
        check_ranges(self, 0, "link_latency_us", high=1e6)
        check_ranges(self, 1, "ep", "cp", high=1e6)
        if self.link_latency_us and gbps is None:
            raise ValueError("--link-latency-us needs --link-gbps")
        if gbps is not None and self.replay != "none":
            raise ValueError("--replay sets the transfer times: leave out --link-gbps and --link-latency-us")
        launch = Launch.from_environment()
        if launch.world_size > 1:
            raise ValueError("profile run is one process with a modeled link: for real ranks, use train.py --profile")
        out = self.out or Path("runs") / f"profile-{self.mode}"
        make_folder(out, f"--out {printable(out)}")

        link = None if gbps is None else Link(gbps / 8, self.link_latency_us)
        sizes = self.num_layers, self.seq_len or None, self.tokens or None
        try:
            device = device_of(self.device, launch)
            workload = PairWorkload.from_preset(self.mode, self.preset, *sizes, self.routing, device, self.fp8, self.cp)
            measurement = measure(workload, out, self.ep, link, self.replay == "deepseek")
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            raise ValueError(f"out of memory: {str(error).splitlines()[0]}") from None
        (out / "report.json").write_text(strict_json.write(measurement.as_object(), indent=1) + "\n")
        files = [*(f"{run}.json.gz" for run in measurement.runs), "report.json"]
        for name in ("perfetto.json.gz", "timeline.png"):
            with suppress(ImportError):  # without matplotlib, there is no .png
                save_lanes(measurement.pictures(), out / name)
                files.append(name)
        text = f"{measurement.as_text()}\n\nin {printable(out)}: {', '.join(sorted(files))}"
        self.show(measurement.as_object(), text)
