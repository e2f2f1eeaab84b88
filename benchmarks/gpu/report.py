"""Format results.json as Markdown: results.md, and a short summary for the terminal.

Numbers are medians; ranges are first to third quartile over the repeats of the run.
"""

from collections.abc import Callable
from typing import Any

from moe_dualpipe.tools.profiler.account import COMPUTATION

from .goals import evaluate_goals
from .implementations import TITLES
from .overlap import DEEPSEEK_TRACE

Results = dict[str, Any]
PHASES = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
MOST_LOST = 8  # lost times in the table of a pair
UNTIMED = {"not installed": "not installed", "skipped": "skipped", "wrong": "WRONG", "failed": "failed"}


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table.

    Example: table(["a", "b"], [["1", "2"]]) has the lines "| a | b |", "|---|---|" and "| 1 | 2 |".
    """
    lines = [header, *rows]
    marked = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([marked[0], "|" + "---|" * len(header), *marked[1:]])


def markdown(results: Results) -> str:
    """Return the whole report."""
    parts = [introduction(results)]
    for name, (section, required_key) in SECTIONS.items():
        record = results.get(name, {})
        if required_key in record:
            parts.append(section(record))
        if "reason" in record:  # a section that failed midway has both
            parts.append(f"{name.capitalize()}: {record['reason']}")
    parts.append(goals_section(results))
    return "\n\n".join(parts) + "\n"


def introduction(results: Results) -> str:
    about = results["about"]
    head = f"# GPU benchmarks: {about['device']}\n\n{about['date']}; {about['versions']}."
    head += f" Kernel configurations: {about['kernel_table']}."
    if about["smoke"]:
        head += "\n\nA smoke run on a CPU with tiny shapes: it shows that the suite works. Its timings are meaningless."
    if ceilings := results.get("ceilings"):
        dense, copy = (format_measurement(ceilings[name]) for name in ("dense", "copy"))
        head += f"\n\nMeasured in this run: dense matmul {dense}, device-to-device copy {copy}."
    return head


def format_measurement(measured: dict[str, Any]) -> str:
    """Example: 788 TFLOP/s (780 to 791)."""
    return f"{format_number(measured['median'])} {measured['unit']} ({format_quartiles(measured)})"


def format_quartiles(measured: dict[str, Any]) -> str:
    return f"{format_number(measured['low'])} to {format_number(measured['high'])}"


def format_number(value: float) -> str:
    """Format with at least three significant digits. Example: 4321.6 is "4,322"."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


# ---- Sections ----


def tests_section(record: dict[str, Any]) -> str:
    return f"## Tests on the GPU\n\n{record['outcome']}: {record['summary']}"


def experts_section(record: dict[str, Any]) -> str:
    text = "## Expert MLP\n\nTFLOP/s (share of a dense bf16 matmul timed interleaved with the implementations)."
    for phase, title in PHASES.items():
        text += f"\n\n### {title.capitalize()}\n\n{experts_table(record, phase)}"
    text += f"\n\n### Quartiles, forward + backward, TFLOP/s\n\n{experts_quartiles(record)}"
    text += f"\n\n### Saved for backward, bytes per token\n\n{saved_bytes_table(record)}"
    text += f"\n\n### Relative error against fp64\n\n{errors_table(record)}"
    if skipped := record.get("skipped"):
        text += f"\n\nSkipped, because time ran out: {'; '.join(skipped)}."
    if notes := reasons_not_timed(record):
        text += "\n\nNot timed:\n\n" + "\n".join(f"- {note}" for note in notes)
    return text


def implementation_names(record: dict[str, Any]) -> list[str]:
    """Return the names of all implementations in the record, in order of first appearance."""
    return list(dict.fromkeys(name for entry in record["shapes"] for name in entry["contestants"]))


def shape_name(shape: dict[str, Any]) -> str:
    sizes = ", ".join(str(shape[name]) for name in "TDFEK")
    return f"{sizes} ({shape['note']})" if shape.get("note") else sizes


def title_of(name: str) -> str:
    return TITLES.get(name, name)


def experts_table(record: dict[str, Any], phase: str) -> str:
    """Columns: shape, one per implementation, ours over the best other one."""
    names = implementation_names(record)
    rows = []
    for entry in record["shapes"]:
        outcomes = entry["contestants"]
        cells = [rate_cell(outcomes.get(name, {}), phase) for name in names]
        rows.append([shape_name(entry["shape"]), *cells, best_ratio(outcomes, phase)])
    return table(["T, D, F, E, K", *map(title_of, names), "ours / best other"], rows)


def rate_cell(outcome: dict[str, Any], phase: str) -> str:
    if phase not in outcome:
        return UNTIMED.get(outcome.get("status", ""), "-")
    return f"{format_number(outcome[phase]['median'])} ({outcome[phase]['share']:.0%})"


def best_ratio(outcomes: dict[str, Any], phase: str) -> str:
    """Return our rate over that of the fastest other implementation, and its name."""
    others = {n: o[phase]["median"] for n, o in outcomes.items() if n != "triton" and phase in o}
    if not others or phase not in outcomes.get("triton", {}):
        return "-"
    best = max(others, key=lambda name: others[name])
    return f"{outcomes['triton'][phase]['median'] / others[best]:.2f} ({title_of(best)})"


def experts_quartiles(record: dict[str, Any]) -> str:
    names = implementation_names(record)
    rows = []
    for entry in record["shapes"]:
        outcomes = [entry["contestants"].get(name, {}) for name in names]
        cells = [format_quartiles(outcome["both"]) if "both" in outcome else "-" for outcome in outcomes]
        dense = format_quartiles(entry["dense"]) if "dense" in entry else "-"
        rows.append([shape_name(entry["shape"]), dense, *cells])
    return table(["T, D, F, E, K", "dense matmul", *map(title_of, names)], rows)


def saved_bytes_table(record: dict[str, Any]) -> str:
    names = implementation_names(record)
    rows = []
    for entry in record["shapes"]:
        saved = [entry["contestants"].get(name, {}).get("kept_bytes_per_token") for name in names]
        cells = ["-" if bytes_ is None else f"{bytes_:,.0f}" for bytes_ in saved]
        rows.append([shape_name(entry["shape"]), f"{entry['shape']['kept_bytes_formula']:,}", *cells])
    return table(["T, D, F, E, K", "2D + 4KF", *map(title_of, names)], rows)


def errors_table(record: dict[str, Any]) -> str:
    """Columns: implementation, and for each tensor its largest error over the shapes."""
    columns = {"y": "y", "x": "dx", "weights": "d weights", "gate_up": "d gate, up", "down": "d down"}
    rows = []
    for name in implementation_names(record):
        found = [entry["contestants"].get(name, {}).get("errors") for entry in record["shapes"]]
        found = [errors for errors in found if errors]
        if found:
            rows.append([title_of(name), *(format_largest_error([errors[key] for errors in found]) for key in columns)])
    return table(["", *columns.values()], rows)


def format_largest_error(errors: list[float | None]) -> str:
    """Return the largest error, or "not finite" if any was NaN or infinite (stored as None)."""
    finite = [error for error in errors if error is not None]
    return f"{max(finite):.1e}" if len(finite) == len(errors) else "not finite"


def reasons_not_timed(record: dict[str, Any]) -> list[str]:
    """Return why implementations were not timed, without repeating a reason that is the same at several shapes."""
    notes: dict[str, None] = {}
    for entry in record["shapes"]:
        for name, outcome in entry["contestants"].items():
            if outcome.get("status") in UNTIMED:
                notes[f"{title_of(name)}: {outcome['status']}, {outcome.get('reason', '')}"] = None
    return list(notes)


def permute_section(record: dict[str, Any]) -> str:
    rows = []
    for entry in (entry for entry in record["shapes"] if "copy" in entry):
        for what, title in (("permute", "permute (gather)"), ("unpermute", "unpermute (combine)")):
            cells = [gb_cell(entry[what][kernels]) for kernels in ("triton", "reference")]
            rows.append([shape_name(entry["shape"]), title, *cells, format_measurement(entry["copy"])])
    header = ["T, D, F, E, K", "", "ours, GB/s (share of a copy)", "torch, GB/s (share)", "copy"]
    return f"## Permute and unpermute\n\nRate: the bytes that must move, per second.\n\n{table(header, rows)}"


def fp8_section(record: dict[str, Any]) -> str:
    rows = [
        [shape_name(entry["shape"]), name, format_measurement(rate) if "median" in rate else rate["status"]]
        for entry in record["shapes"]
        for name, rate in entry["rates"].items()
    ]
    return f"## FP8\n\n{table(['T, D, F, E, K', '', 'rate'], rows)}"


def gb_cell(outcome: dict[str, Any]) -> str:
    if "median" not in outcome:
        return UNTIMED.get(outcome.get("status", ""), "-")
    return f"{format_number(outcome['median'])} ({outcome['share']:.0%})"


def routing_section(record: dict[str, Any]) -> str:
    rows = []
    for entry in (entry for entry in record["sizes"] if "order" in entry):
        for what, title in (("route", "choose experts"), ("order", "sort by expert")):
            cells = [us_cell(entry[what][kernels]) for kernels in ("triton", "reference")]
            rows.append([f"{entry['T']}, {entry['E']}, {entry['K']}", title, *cells])
    header = ["T, E, K", "", "ours, us: eager / CUDA graph", "torch, us: eager / CUDA graph"]
    return f"## Routing\n\n{table(header, rows)}"


def us_cell(outcome: dict[str, Any]) -> str:
    if "called" not in outcome:
        return UNTIMED.get(outcome.get("status", ""), "-")
    graph = outcome.get("graph")
    return f"{format_number(outcome['called']['median'])} / {format_number(graph['median']) if graph else '-'}"


def transfers_section(record: dict[str, Any]) -> str:
    """Columns: multiprocessors, then GB/s of dispatch and combine, and of both parts of dispatch."""
    rows = []
    for n, dispatch in record["dispatch"].items():
        parts = [format_number(dispatch[part]["median"]) if part in dispatch else "-" for part in ("push", "receive")]
        rows.append([n, gb_cell(dispatch), *parts, gb_cell(record["combine"][n])])
    sizes = ", ".join(f"{name}={size}" for name, size in record["sizes"].items())
    reasons = {o["reason"]: None for name in ("dispatch", "combine") for o in record[name].values() if "reason" in o}
    header = ["multiprocessors", "dispatch, GB/s (share of a copy)", "push", "receive", "combine, GB/s (share)"]
    return "\n\n".join([
        f"## One-sided transfers\n\nWithin one GPU: {sizes}; {record['rows']:,} rows. Rate: the bytes of rows read and "
        f"written, per second. A copy of these rows by all multiprocessors: {format_measurement(record['copy'])}.",
        table(header, rows), *(f"- {reason}" for reason in reasons),
    ])  # fmt: skip


def training_section(record: dict[str, Any]) -> str:
    titles = {"triton": "Triton kernels", "reference": "torch grouped_mm", "loop": "a loop over experts"}
    rows = []
    for name, outcome in record["runs"].items():
        if outcome["status"] != "timed":
            rows.append([titles[name], f"{outcome['status']}: {outcome['reason']}", *["-"] * 5])
            continue
        memory = outcome["peak_memory_gb"]
        rows.append([
            titles[name], f"{outcome['tokens_per_s']['median']:,.0f}", format_quartiles(outcome["tokens_per_s"]),
            f"{outcome['utilization']:.1%}", "-" if memory is None else f"{memory:.1f}", str(outcome["steps"]),
            f"{outcome['loss']:.4f}",
        ])  # fmt: skip
    header = ["experts", "tokens/s", "quartiles", "utilization", "peak, GB", "steps", "validation loss, nats per byte"]
    return (
        f"## Training\n\n{record['seconds']:.0f} s per run, {record['tokens_per_step']:,} tokens per step. "
        "Utilization: model FLOPs per second / the dense matmul's. Model FLOPs per token: 6 x active parameters + "
        f"6 x layers x heads x head_dim x length.\n\n{table(header, rows)}"
    )


def goals_section(results: Results) -> str:
    rows = [[v.title, v.target, v.measured, v.status] for v in evaluate_goals(results)]
    return f"## Goals\n\n{table(['', 'goal', 'measured', ''], rows)}"


def terminal_summary(results: Results) -> str:
    """Return the summary that is printed at the end."""
    lines = []
    if tests := results.get("tests"):
        lines.append(f"tests: {tests['outcome']}: {tests['summary']}\n")
    if (experts := results.get("experts")) and experts.get("shapes"):
        lines += [f"{PHASES[phase]}, TFLOP/s\n{experts_table(experts, phase)}\n" for phase in ("forward", "both")]
    lines.append(goals_section(results))
    return "\n".join(lines)


def overlap_section(record: dict[str, Any]) -> str:
    """Columns: milliseconds of a pair, sequential and overlapped. The last row is DeepSeek's trace."""
    rows = []
    for name, found in record["runs"].items():
        if found["status"] != "timed":
            rows.append([name, found["reason"], *[""] * 5])
            continue
        sequential, pair = found["sequential"], found["overlapped"]
        times = (sequential["window_us"], pair["window_us"], found["bound_us"], pair["compute_us"], pair["comm_us"])
        rows.append([name, *(f"{us / 1e3:,.1f}" for us in times), f"{pair['hidden_fraction']:.1%}"])
    window, compute, comm = (f"{DEEPSEEK_TRACE[key] / 1e3:,.1f}" for key in ("window_us", "compute_us", "comm_us"))
    rows.append(["DeepSeek's trace (H800)", "", window, "", compute, comm, f"{DEEPSEEK_TRACE['hidden_fraction']:.1%}"])
    header = ["", "sequential, ms", "overlapped", "bound", "computation", "communication", "hidden"]
    timed = {name: found["overlapped"] for name, found in record["runs"].items() if found["status"] == "timed"}
    text = "## Overlap of a pair of chunks, experts over 64 ranks\n\n" + table(header, rows)
    return "\n\n".join([text, *(overlap_details(name, pair) for name, pair in timed.items())])


def overlap_details(name: str, pair: dict[str, Any]) -> str:
    """How many multiprocessors transfers occupy, the largest lost times, and the causes."""
    lost = [entry for entry in pair["account"] if entry["kind"] != COMPUTATION][:MOST_LOST]
    rows = [[entry["kind"], entry["detail"] or "-", str(entry["times"]), f"{entry['us']:,.0f}"] for entry in lost]
    causes = [
        [cause["kind"], cause["place"], "-" if cause["gain_us"] is None else f"{cause['gain_us']:,.0f}"]
        for cause in pair["verdicts"]
    ]
    blocks, count = (pair[key] or "-" for key in ("comm_blocks", "num_sms"))
    sms = f"transfers use up to {blocks} thread blocks; the GPU has {count} multiprocessors"
    lost_times = table(["lost time", "where", "times", "us"], rows)
    return f"### {name}, overlapped: {sms}\n\n{lost_times}\n\n{table(['cause', 'most of it', 'gain, us'], causes)}"


# name -> (function that formats the section, key that its record has once there are results)
SECTIONS: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "tests": (tests_section, "outcome"),
    "experts": (experts_section, "shapes"),
    "permute": (permute_section, "shapes"),
    "fp8": (fp8_section, "shapes"),
    "routing": (routing_section, "sizes"),
    "transfers": (transfers_section, "copy"),
    "overlap": (overlap_section, "runs"),
    "training": (training_section, "runs"),
}
