"""Checkpoints on disk, made by hand."""

from moe_dualpipe.checkpoint.manifest import FileChecksum, Manifest


def write_manifest(folder, step=3, model=None):
    """A checkpoint of no tensors at all."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tensors.json").write_bytes(b"{}")
    files = {"tensors.json": FileChecksum.of(b"{}")}
    (folder / "run.json").write_bytes(Manifest(step, model or {}, files).encode())
