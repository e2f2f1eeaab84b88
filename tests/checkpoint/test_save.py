"""Saving checkpoints: complete or not at all, with full disks, killed ranks and saves in the background."""

import contextlib
import io
import os
import random
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.checkpoint import SaveError, Saver, find_checkpoint, load_checkpoint, save_checkpoint
from moe_dualpipe.checkpoint import save as save_module
from moe_dualpipe.checkpoint.expert_loads import read_loads
from moe_dualpipe.models import ModelConfig
from tests.support.checkpoints import FullDisk, checkpoint_names, loaded_step, save_steps, state_of
from tests.support.ranks import run_ranks, started
from tests.support.runs import settings, train


def save_and_remove(rank, run, saves):
    return [save_steps(rank, run, steps, keep) for steps, keep in saves]


def test_saving_removes_old_checkpoints_and_unfinished_folders(run):
    for remnant in (".step-000009.unfinished", ".step-000003.removed"):
        (run / "checkpoints" / remnant / "below").mkdir(parents=True)
    # Later steps belong to another run, so they are never removed.
    left = run_ranks(1, save_and_remove, run, [([7], 2), ([10], 1), ([11, 11, 12], 0)])[0]
    assert left == [
        ["step-000005", "step-000007", "step-000009"], ["step-000010"], ["step-000010", "step-000011", "step-000012"],
    ]  # fmt: skip


# ---- Failed and killed saves ----


def save_on_full_disks(rank, run):
    """Let the disk of each rank be full in turn, at random places."""
    rng, before = random.Random(1), checkpoint_names(run)
    with pytest.MonkeyPatch.context() as patch:
        disk = FullDisk(patch)
        for attempt in range(9):
            full_rank, room = rng.randrange(2), rng.randrange(40)
            disk.room = room if rank == full_rank else 10**9
            with pytest.raises(SaveError, match=rf"^rank {full_rank}: \[Errno 28\] No space left on device"):
                save_checkpoint(run, 20 + attempt, state_of(rank, 0), ModelConfig(), keep=1)
            assert checkpoint_names(run) == before, (full_rank, room)
            dist.barrier()
        disk.room = 10**9
        save_checkpoint(run, 40, state_of(rank, 40), ModelConfig(), keep=1)
    return checkpoint_names(run)


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_leaves_no_files(run):
    assert run_ranks(2, save_on_full_disks, run) == [["step-000040"]] * 2
    assert loaded_step(find_checkpoint(str(run))) == 40


def save_until(store, rank, run, step, dies):
    """Save one checkpoint. dies: the rank that ends without a word, and the operation before which it does."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    operations = []

    def announce(operation):
        operations.append(operation)
        if dies == (rank, len(operations)):
            os._exit(9)

    save_checkpoint(run, step, state_of(rank, step), ModelConfig(), keep=2, announce=announce)
    os._exit(0)


def test_a_death_at_any_point_of_a_save_leaves_an_intact_checkpoint(run, tmp_path):
    """Before each operation. Each attempt starts with the files that the one before it has left."""
    for rank in (0, 1):
        for number in range(1, 100):
            before = loaded_step(find_checkpoint(str(run)))
            store, dies = tmp_path / f"store-{rank}-{number}", (rank, number)
            with started(save_until, [(store, one, run, before + 1, dies) for one in (0, 1)]) as processes:
                processes[rank].join(60)
                if died := processes[rank].exitcode == 9:
                    processes[1 - rank].kill()
                processes[1 - rank].join(60)
            found = loaded_step(find_checkpoint(str(run), (messages := []).append))
            assert not messages, "an incomplete checkpoint has the name of a complete one"
            assert found in (before, before + 1) and (died or found == before + 1)
            if not died:
                assert number > 5
                break
    assert run_ranks(1, save_steps, run, [99], 1) == [["step-000099"]], "a remnant stays"


# ---- The background saver ----


def save_in_each_way(rank, run):
    """Save in the background, with a state that changes before it can be written; and at once, on a full disk."""
    may_write, write = threading.Event(), save_module.save_checkpoint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "save_checkpoint", lambda *arguments: may_write.wait(60) and write(*arguments))
        saver = Saver(run / "background", ModelConfig(), keep=2)
        saver.start(4, state := state_of(rank, 4))
        for tensor in state.values():
            tensor.fill_(-7)
        early = saver.busy, saver.poll(), (run / "background").exists()
        dist.barrier()
        may_write.set()
        saved = saver.wait()
        assert early == (True, None, False) and saver.wait() is None
        assert saved is not None and (saved.path.name, saved.error) == ("step-000004", "")
        saver.start(5, state_of(rank, 5))
        saver.close()
    failing = Saver(run / "failing", ModelConfig(), keep=2, background=False)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as err:
        FullDisk(patch)
        failing.start(4, state_of(rank, 4))
        assert not failing.busy
        failing.close()
    return err.getvalue().count("could not be written: all ranks: [Errno 28] No space left on device")


def test_a_save_holds_the_state_at_start_and_close_finishes_it(tmp_path):
    assert run_ranks(2, save_in_each_way, tmp_path) == [1, 0]
    for step in (4, 5):
        assert loaded_step(tmp_path / "background" / "checkpoints" / f"step-{step:06d}") == step


def save_in_small_files(rank, run):
    """Return the operations that a save announces, and the files and folders that it syncs, both in order."""
    operations, synced, fsync = [], [], os.fsync

    def sync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    state = {f"tensor{rank}.{i}": torch.arange(2500, dtype=torch.int32) for i in range(8)} | {"empty": torch.empty(0)}
    save_checkpoint(run, 9, state, ModelConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "_FILE_BYTES", 25_000)
        patch.setattr(os, "fsync", sync)
        save_checkpoint(run, 10, state, ModelConfig(), keep=1, announce=operations.append)
    return operations, synced


def test_files_have_a_limited_size_and_each_operation_on_the_disk_is_announced(tmp_path):
    files = [[f"rank-{rank}-{i}.safetensors" for i in range(4)] for rank in range(2)]
    last = ["run.json", ".step-000010.unfinished", "checkpoints"]
    for rank, (operations, synced) in enumerate(run_ranks(2, save_in_small_files, tmp_path)):
        assert synced == files[rank] + (last if rank == 0 else [])
        expected = [f"{operation} {name}" for name in files[rank] for operation in ("writing", "syncing", "checking")]
        if rank == 0:
            removed = sorted(f"removing rank-{other}-0.safetensors" for other in range(2))
            expected = ["creating its folder", *expected, "writing run.json", "renaming its folder",
                        "removing old checkpoints", *removed, "removing run.json"]  # fmt: skip
        assert sorted(filter(None, operations)) == sorted(expected) and operations[-1] == ""  # before the last barrier
    loaded = {f"tensor{rank}.{i}": torch.zeros(2500, dtype=torch.int32) for rank in range(2) for i in range(8)}
    load_checkpoint(found := find_checkpoint(str(tmp_path)), loaded | {"empty": torch.empty(0)})
    assert all(torch.equal(tensor, torch.arange(2500, dtype=torch.int32)) for tensor in loaded.values())
    assert len({path.stat().st_mode & 0o777 for path in found.iterdir()}) == 1


def test_a_tensor_is_written_by_the_rank_with_the_fewest_bytes_of_those_that_hold_it():
    sizes = [{"a": 5, "both": 3, "all": 1}, {"b": 1, "both": 3, "all": 1}, {"all": 1}]
    assert save_module._owners(sizes) == {"a": 0, "b": 1, "both": 1, "all": 2}


# ---- The loads of experts that a run writes beside its checkpoints, and files of loads that are wrong ----


def test_the_loads_of_a_run_are_in_its_checkpoints(tmp_path, refused):
    config = settings(tmp_path / "run", seq_len=16, steps=3, save_every=2, keep=None)
    run_ranks(1, train, config)
    tokens = 4 * 16  # of a step
    for step, steps in ((2, 2), (3, 1)):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:06}"
        layers, loads, maxima = read_loads(folder / "expert_loads.json")
        assert layers == [*range(config.model.num_dense_layers, config.model.num_layers)]
        assert [sum(load) for load in loads] == [steps * tokens * config.model.experts_per_token] * len(layers)
        largest = [max(load) * len(load) / sum(load) for load in loads]  # of the sum
        assert all(1.001 * mean >= one for mean, one in zip(maxima, largest, strict=True))
        assert steps > 1 or maxima == pytest.approx(largest)
    (folder / "expert_loads.json").unlink()
    words = ["plan", "estimate", "--model", "tiny", "--gpu", "l4", "--gpus", "2", "--loads"]
    assert f"{folder} is broken: " in refused(*words, folder)


@pytest.mark.parametrize("text,message", [
    ("[1]", "Expected `object`"), ('{"loads": [1]}', "Expected `array`"), ('{"loads": [["a"]]}', "Expected `float`"),
    ('{"loads": [[1]], "layers": [1, 2]}', '"layers" and '), ('{"loads": [[1]], "maxima": [1, 2]}', '"maxima" in '),
    ("{", "cannot read "),
])  # fmt: skip
def test_a_wrong_file_is_named(tmp_path, text, message):
    (tmp_path / "loads.json").write_text(text)
    with pytest.raises(ValueError, match=rf"{message}.*loads.json|loads.json.*{message}"):
        read_loads(tmp_path / "loads.json")
