"""The size of models, in a Markdown table and in sentences."""

from collections.abc import Sequence

from ...models.shape import ModelShape
from ..drawing.tables import markdown


def sizes_table(shapes: Sequence[ModelShape]) -> str:
    """Return a table with one row per model."""
    rows = [["preset", "layers", "experts", "per token", "shared", "vocabulary", "parameters", "active"]]
    for shape in shapes:
        counts = format_count(shape.parameters), format_count(shape.active_parameters)
        rows.append([shape.name, str(len(shape.layers)), *map(str, _experts(shape)), f"{shape.vocab:,}", *counts])
    return markdown(rows)


def _experts(shape: ModelShape) -> tuple[int, int, int]:
    """Experts of a layer, those of a token, and shared ones."""
    last = shape.layers[-1]
    return last.experts, last.top_k, last.shared_size // max(1, last.expert_size)


def size_summary(shape: ModelShape, seq_len: int) -> str:
    """Return layers, experts, parameters and FLOPs of one model in sentences."""
    active, forward = shape.active_parameters, shape.forward_flops(seq_len)
    experts, top_k, shared = _experts(shape)
    dense = sum(not layer.experts for layer in shape.layers)
    return (
        f"{shape.name}: {len(shape.layers)} layers, {dense} of them dense; {experts} experts, "
        f"{top_k} per token, and {shared} shared\n"
        f"{format_count(shape.parameters)} parameters, {format_count(active)} active "
        f"({format_count(active - shape.embedding)} without the embedding, which is only looked up)\n"
        f"FLOPs per token at {seq_len:,} tokens: {forward / 1e9:,.2f} G forward, "
        f"{shape.score_flops(seq_len) / forward:.0%} of it causal attention; "
        f"{shape.train_flops(seq_len) / 1e9:,.2f} G in training"
    )


def format_count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"
