"""A step is global: the same sequences, and the mean over the same labeled tokens, in every layout."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from moe_dualpipe import Pipeline, join_world, train
from moe_dualpipe.data import Source, TextData, load_data, prepare_data
from moe_dualpipe.data.samples import Text
from moe_dualpipe.models import StageOptions, build_model
from moe_dualpipe.schedule import build
from moe_dualpipe.training.loop import train_loop
from moe_dualpipe.training.step import check_same_text
from tests.support.ranks import each, run_ranks
from tests.support.runs import (
    MODEL,
    SHALLOW,
    change,
    losses,
    make_trainer,
    note_sequences,
    records,
    sequences,
    settings,
)

BASE = {"model": MODEL, "steps": 2, "seq_len": 16, "batch_size": 16, "eval_sequences": 16}
LAYOUTS = {
    1: [{"schedule": "dualpipev"}, {"micro_batch_size": 4}, {"schedule": "1f1b", "micro_batch_size": 8}],
    2: [{"layers": "3,1"}, {}, {"schedule": "1f1b"}, {"schedule": "interleaved_1f1b", "num_chunks": 2},
        {"schedule": "dualpipev"},
        {"pp": 1}, {"pp": 1, "ep": 2}, {"pp": 1, "ep": 2, "micro_batch_size": 2}, {"cp": 2}],
    4: [{"pp": 2, "ep": 2}, {"pp": 4, "micro_batch_size": 2}, {"pp": 1, "ep": 4}, {"pp": 2, "cp": 2, "ep": 2}],
}  # fmt: skip


# ---- What is read ----


@limits(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(0, 9), st.integers(1, 24), st.integers(0, 5))
def test_parts_of_a_step_are_parts_of_the_whole(sources, step, count, seed):
    streams = [np.random.default_rng(i).integers(0, 256, 500) for i in range(sources)]
    text = TextData(tuple(Source(str(i), 1.0 + i, Text(s), Text(s), "") for i, s in enumerate(streams)))
    whole = text.batch(seed, step, count, 6)
    assert len(whole[0]) == count and (whole[1] >= 0).all() and text.all_labeled
    for dp in (n for n in range(1, count + 1) if count % n == 0):
        own = count // dp
        parts = [text.batch(seed, step, count, 6, range(r * own, r * own + own)) for r in range(dp)]
        for i in (0, 1):
            assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


def run_and_read(rank, config, given):
    """A run of given or of text batches. Returns the sequences that this rank reads, by step, and the records."""
    trainer = make_trainer(rank, config, **given)
    read = note_sequences(trainer)
    train_loop(trainer, verbose=False)
    return read, records(config.checkpoint.out)


# ---- Labels that are ignored ----


def spread(number, seed):
    """`number` sequences with uneven numbers of labels: the second half has few, and some sequences have none."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = (torch.randint(256, (number, 16), generator=generator) for _ in range(2))
    ignored = torch.rand(labels.shape, generator=generator) < torch.linspace(0, 1, number)[:, None]
    labels[ignored] = -100
    labels[1] = labels[-2] = labels[-1] = -100
    return inputs, labels


def uneven(step):
    return spread(16, step)


GIVEN = {"batches": uneven, "validation": spread(16, 99)}


def plain_loss(config):
    """The loss of all labeled tokens of the first step at once, and of the validation sequences, without a pipeline."""
    model = build_model(config.model, options=StageOptions(config.seed))
    found = []
    for inputs, labels in (uneven(0), GIVEN["validation"]):
        with torch.no_grad():
            logits = model.logits(model(inputs))
        found.append(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).item()
        )
    return found


def compare_all(folder, given, layouts):
    """Run all layouts and compare them with the first run, of one process. Returns its losses."""
    reference = None
    for number, changes in layouts.items():
        configs = [settings(folder / f"{number}-{i}", **{**BASE, **one}) for i, one in enumerate(changes)]
        runs = run_ranks(number, each, run_and_read, configs, given)
        for ranks, one in zip(zip(*runs, strict=True), changes, strict=True):
            read, metrics = sequences([read for read, _ in ranks]), ranks[0][1]
            found = {kind: losses(metrics, kind) for kind in ("loss", "validation_loss", "grad_norm")}
            reference = reference or (read, found)
            assert read == reference[0], (number, one)
            for kind, values in found.items():
                rel = 1e-4 if kind == "grad_norm" else 1e-6
                assert values == pytest.approx(reference[1][kind], rel=rel), (number, one, kind)
            # A micro-batch runs through the same products in the same order; gradients are summed in another one.
            if not {*one} - {"schedule", "num_chunks", "layers"}:
                assert found["loss"][1] == reference[1]["loss"][1], (number, one)
    assert reference is not None and len({tuple(inputs) for inputs, _ in reference[0][1]}) > 10
    return reference[1]


@pytest.mark.parametrize("layouts", [{1: [{}], 2: [LAYOUTS[2][0], LAYOUTS[2][-1]]}, LAYOUTS], ids=["few", "all"])
@pytest.mark.parametrize("given", [{}, GIVEN], ids=["text", "ignored"])
@pytest.mark.quick("ignored-few")
def test_a_step_has_the_same_sequences_and_the_mean_loss_of_their_labels_in_every_layout(tmp_path, given, layouts):
    """With labels that are ignored, micro-batches without any are among them, and whole ranks with few."""
    found = compare_all(tmp_path, given, layouts)
    assert [*found["loss"]] == [1, 2] and [*found["validation_loss"]] == [0, 2]
    if given:
        first = [found["loss"][1], found["validation_loss"][0]]
        assert first == pytest.approx(plain_loss(settings(tmp_path, **BASE)), rel=1e-6)


def nothing_labeled(step):
    inputs, labels = uneven(step)
    return inputs, torch.full_like(labels, -100) if step == 1 else labels


def test_a_batch_without_any_label_is_an_error_with_its_step(tmp_path):
    config, unlabeled = change(settings(tmp_path, **BASE), out=None), nothing_labeled(1)
    with pytest.raises(ValueError, match=r"^batches\(1\) has no label: all of them are -100, so there is no loss$"):
        train(config, batches=nothing_labeled, verbose=False)
    with pytest.raises(ValueError, match=r"^validation has no label: all of them are -100"):
        train(config, batches=uneven, validation=unlabeled, verbose=False)
    schedule = build("1f1b", 1, 16)
    with join_world("cpu"), pytest.raises(ValueError, match="this batch has no label"):
        Pipeline(SHALLOW, schedule, (1, 16)).step(*unlabeled)


# ---- All ranks must have the same text: the first stage takes the inputs from it, the last one the labels ----


TEXT = "".join(f"line {i}\n" for i in range(400))


def compared(rank, cases):
    """What each case says, in which every rank has one of its sources."""
    said = []
    for sources in cases:
        try:
            check_same_text(load_data(sources[rank], 8))
            said.append("same")
        except ValueError as error:
            said.append(str(error).partition(": ")[2].partition(";")[0])
    return said


def test_the_text_counts_and_its_place_does_not(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "d").write_text(TEXT[:-1])
    prepare_data([str(tmp_path / "a")], tmp_path / "tokens", "bytes", 1, "text")
    tokens = np.fromfile(tmp_path / "tokens" / "train.bin", np.uint8)
    tokens.tofile(tmp_path / "bare.bin")
    a, b, d, bare = ([str(tmp_path / name)] for name in ("a", "b", "d", "bare.bin"))
    twice = [f"{a[0]}=2", *d]
    cases = [
        [a, b, a], [a, d, d], [[*a, *d], [*d, *a], [*b, *d]],
        [twice, [f"{b[0]}=2", *d], twice], [twice, [*b, *d], twice],
    ]  # fmt: skip
    one = "those of 1 rank (1) differ from those of rank 0"
    two = "those of 2 ranks (1, 2) differ from those of rank 0"
    assert run_ranks(3, compared, cases) == [["same", two, one, "same", one]] * 3
    before = load_data(bare, 8, dtype="uint8")
    assert before.fingerprint() == load_data(bare, 8, dtype="uint8").fingerprint() > 0
    tokens[0] += 1
    (tmp_path / "new").write_bytes(tokens.tobytes())
    (tmp_path / "new").replace(bare[0])
    assert load_data(bare, 8, dtype="uint8").fingerprint() != before.fingerprint()
