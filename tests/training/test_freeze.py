"""`--freeze PATTERN` gives the same run as layers that freeze their own parameters, in every layout."""

import dataclasses
import re

import pytest
import torch

from moe_dualpipe.checkpoint import find_checkpoint, load_model
from moe_dualpipe.checkpoint.weights import global_weights
from moe_dualpipe.models import build_model
from moe_dualpipe.training.config import OptimizerConfig
from moe_dualpipe.training.options import parse_arguments
from tests.support.frozen import Freezer
from tests.support.own_layers import ExpertList
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, SHALLOW, change, introduction, losses, make_run, make_trainer, settings, train

EXPERTS_AND_EMBEDDING = ("*.experts.*", "embedding.weight")
SMALL = {"seq_len": 16, "eval_sequences": 1, "steps": 4, "optim": OptimizerConfig(lr=0.05, warmup_steps=0)}
MUON = OptimizerConfig("muon", lr=0.05, warmup_steps=0)


def parameters_of(trainer):
    return {name: p for stage in trainer.stages.values() for name, p in stage.named_parameters()}


def is_experts_or_embedding(name):
    return ".experts." in name or name == "embedding.weight"


def frozen_by_option_and_by_layer(rank, config):
    """Train three steps with `--freeze`, and with layers that freeze the same parameters; compare all bits."""
    trainer = make_trainer(rank, change(config, freeze=EXPERTS_AND_EMBEDDING))
    before = {name: p.detach().clone() for name, p in parameters_of(trainer).items()}
    with pytest.MonkeyPatch.context() as patch:
        Freezer(patch, r"\.experts\.|^embedding\.weight$")
        other = make_trainer(rank, config)
    for step in range(3):
        records = [{**one.step(step).record, "seconds": 0, "tokens_per_s": 0} for one in (trainer, other)]
        assert all(records[0][kind] == records[1][kind] for kind in ("loss", "grad_norm"))
    after, expected = parameters_of(trainer), parameters_of(other)
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    frozen = {name for name in after if torch.equal(after[name], before[name])}
    assert frozen == {name for name in after if is_experts_or_embedding(name)} != set()
    state, its_state = trainer.optimizer.tensors(), other.optimizer.tensors()
    assert state.keys() == its_state.keys()
    assert all(torch.equal(state[name], its_state[name]) for name in state)
    trainer.check_replicas()


@pytest.mark.parametrize("ranks,changes", [
    (1, {}),
    (2, {}),
    (2, {"pp": 1, "ep": 2, "dtype": "bfloat16", "optim": MUON}),
    (2, {"pp": 1, "zero": False, "dtype": "bfloat16"}),
    (4, {"pp": 2, "ep": 2, "batch_size": 8, "model": dataclasses.replace(SHALLOW, mtp_layers=1)}),
], ids=lambda value: "" if isinstance(value, int) else ",".join(value))  # fmt: skip
@pytest.mark.quick("-pp,ep,dtype,optim")
def test_frozen_parameters_keep_all_bits_and_the_others_train_as_if_the_layer_had_frozen_them(
    tmp_path, ranks, changes
):  # fmt: skip
    run_ranks(ranks, frozen_by_option_and_by_layer, settings(tmp_path, **{**SMALL, **changes}))


def stop_and_resume(rank, config, folder):
    whole = train(rank, config)
    rest = train(rank, change(config, resume=f"{config.checkpoint.out}/checkpoints/step-000002", out=folder))
    return losses(whole), losses(rest)


@pytest.mark.long
def test_a_run_with_frozen_experts_resumes_and_exports_them(tmp_path):
    config = settings(tmp_path / "run", **SMALL, pp=1, ep=2, save_every=2, freeze=EXPERTS_AND_EMBEDDING)
    whole, rest = run_ranks(2, stop_and_resume, config, str(tmp_path / "rest"))[0]
    assert rest == {step: loss for step, loss in whole.items() if step > 2}
    fresh, saved = (
        global_weights(model) for model in (build_model(SHALLOW), load_model(find_checkpoint(str(tmp_path / "run"))))
    )
    same = {name for name in fresh if torch.equal(fresh[name], saved[name])}
    assert same == {name for name in fresh if is_experts_or_embedding(name)}


def test_biases_of_routers_are_not_parameters(tmp_path):
    """They are kept by a bias_rate of 0."""
    model, moved = dataclasses.replace(SHALLOW, router_bias=True), {}
    for rate in (0.0, 0.003):
        config = settings(tmp_path / str(rate), **{**SMALL, "steps": 1}, model=model, freeze=("layers.*",))
        run_ranks(1, train, change(config, bias_rate=rate))
        saved = global_weights(load_model(find_checkpoint(str(tmp_path / str(rate)))))
        fresh = global_weights(build_model(model))
        changed = [name for name in fresh if not torch.equal(saved[name], fresh[name])]
        moved[rate] = {name.rpartition(".")[2] for name in changed}
    assert moved == {0.0: {"weight"}, 0.003: {"weight", "bias_E"}}


def errors(rank, configs):
    found = []
    for config in configs:
        with pytest.raises(ValueError) as error:
            make_trainer(rank, config)
        found.append(str(error.value))
    return found


@pytest.mark.parametrize("changes", [{}, {"pp": 1, "ep": 2}], ids=str)
@pytest.mark.quick("{'pp': 1, 'ep': 2}")
def test_patterns_that_cannot_be_used(tmp_path, changes):
    """The messages are the same on all ranks and in all layouts."""
    mixed = (
        "--freeze matches layers.2.mlp.experts.gate_up.1, but not layers.2.mlp.experts.gate_up.0, which is in the same "
        "parameter: use 'layers.2.mlp.experts.gate_up.*' for all"
    )
    expected = {
        ("embeding.weight",): "--freeze 'embeding.weight' matches no parameter; near names: embedding.weight, ",
        ("head.*", "layers.2.mlp.expert.*"): "--freeze 'layers.2.mlp.expert.*' matches no parameter; near names: "
        "layers.*.mlp.experts.",
        ("layers.2.mlp.experts.gate_up.[123]",): mixed,
        ("*.experts.gate_up.1", "*.experts.gate_up.[23]"): mixed.replace("layers.2", "layers.1"),
        ("*",): "all parameters of the model are frozen (requires_grad=False): there is nothing to train",
    }
    config = settings(tmp_path, **SMALL, model=MODEL, **changes)
    found = run_ranks(2, errors, [change(config, freeze=patterns) for patterns in expected])
    assert found[0] == found[1]
    for message, start in zip(found[0], expected.values(), strict=True):
        assert message.startswith(start) and "\n" not in message


def freeze_single_experts(rank, config):
    trainer = make_trainer(rank, config)
    return {name for name, p in parameters_of(trainer).items() if not p.requires_grad}


def test_single_experts_of_a_list_can_be_frozen(tmp_path):
    model = dataclasses.replace(MODEL, experts=ExpertList)
    config = settings(tmp_path, **SMALL, pp=1, ep=2, model=model, freeze=("layers.3.mlp.experts.each.[02].*",))
    first, second = run_ranks(2, freeze_single_experts, config)
    names = {"layers.3.mlp.experts.each.0.gate_up.weight", "layers.3.mlp.experts.each.0.down.weight"}
    assert first == second == names  # each rank has two experts: 0 and 1, 2 and 3


def test_a_tuple_is_needed_in_python(tmp_path):
    with pytest.raises(ValueError, match=r"^--freeze must be a tuple of patterns: got 'head\.weight'$"):
        make_run(settings(tmp_path, freeze="head.weight"))


@pytest.mark.parametrize("arguments", [
    ["--freeze", "a", "b*", "--seed", "3"],
    ["--freeze", "a", "--seed", "3", "--freeze", "b*"],
    ["--freeze=a", "--seed=3", "--freeze=b*"],
], ids=" ".join)  # fmt: skip
def test_the_flag_may_be_repeated(arguments):
    config = parse_arguments(arguments)
    assert (config.freeze, config.seed) == (("a", "b*"), 3)


def trained_and_state(rank, config):
    trainer = make_trainer(rank, config)
    printed = introduction(rank, config)
    trained = sum(p.numel() for p in parameters_of(trainer).values() if p.requires_grad)
    return trained, trainer.optimizer.state_bytes, printed


def test_frozen_parameters_have_no_state_and_are_counted(tmp_path):
    config = settings(tmp_path, **SMALL, pp=1, freeze=("layers.*",))
    found = run_ranks(2, trained_and_state, config)
    trained = found[0][0]
    assert sum(state_bytes for _, state_bytes, _ in found) == 8 * trained  # with ZeRO, each moment has one owner
    size = sum(p.numel() for p in build_model(SHALLOW).parameters())
    numbers = re.search(r" active, (\S+) M trained, (\S+) M frozen\n", found[0][-1])
    assert [*map(float, numbers.groups())] == pytest.approx([trained / 1e6, (size - trained) / 1e6], abs=0.005)
