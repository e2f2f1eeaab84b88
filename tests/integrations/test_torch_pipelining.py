"""Under torch's ScheduleDualPipeV, our stages train like the single-process model, and pairs are overlapped."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import BACKWARD_WEIGHT, OVERLAP_F_B, ScheduleDualPipeV

from moe_dualpipe.integrations.torch_pipelining import backward_weight, overlap_f_b, register
from moe_dualpipe.models import ModelConfig, StageOptions, TransformerStage, build_model, next_token_loss, split
from tests.support.ranks import run_ranks

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, num_layers=4, num_dense_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    dense_size=48, expert_size=24, num_experts=6, experts_per_token=2, init_std=0.1,
)  # fmt: skip
MICRO_BATCHES, SIZE, LENGTH, SEED, LR = 5, 2, 12, 3, 0.5
CPU = torch.device("cpu")
OLD_TORCH = "before torch 2.13, ScheduleDualPipeV sends to its own rank, which gloo refuses"
runs_the_schedule = pytest.mark.skipif(torch.__version__ < "2.13", reason=OLD_TORCH)


class Counting(TransformerStage):
    """A stage that counts overlapped pairs."""

    overlapped = 0

    @classmethod
    def overlapped_forward_backward(cls, *args, **kwargs):
        Counting.overlapped += 1
        return super().overlapped_forward_backward(*args, **kwargs)


def batch(seed):
    tokens = torch.randint(
        CONFIG.vocab_size, (MICRO_BATCHES * SIZE, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    return tokens[:, :-1], tokens[:, 1:]


def plain_step(model, seed):
    """Losses by micro-batch, and the gradients of their sum, in plain training."""
    losses = []
    for x, y in zip(*(t.split(SIZE) for t in batch(seed)), strict=True):
        loss = model.loss(model(x), y)
        loss.backward()
        losses.append(loss.detach())
    return losses


def make_schedule(modules, shapes=True, scale_grads=False):
    """torch's schedule of the two stages of this rank, `modules` by index."""
    last = 2 * dist.get_world_size() - 1
    stages = []
    for index, module in modules.items():
        hidden = torch.empty(SIZE, LENGTH, CONFIG.hidden_size, requires_grad=True)
        tokens = torch.empty(SIZE, LENGTH, dtype=torch.long)
        logits = torch.empty(SIZE, LENGTH, CONFIG.vocab_size, requires_grad=True)
        ends_in_logits = index == last and not getattr(module, "head_in_loss", False)
        known = {"input_args": hidden if index else tokens, "output_args": logits if ends_in_logits else hidden}
        stages.append(PipelineStage(module, index, last + 1, CPU, **(known if shapes else {})))
    criterion = getattr(modules.get(last), "loss", next_token_loss)
    return ScheduleDualPipeV(stages, MICRO_BATCHES, criterion, scale_grads=scale_grads)


def make_modules(rank, pp, fused_loss=False):
    specs = split(CONFIG, 2 * pp)
    return {
        index: Counting(CONFIG, specs[index], None, StageOptions(SEED, fused_loss=fused_loss))
        for index in (rank, 2 * pp - 1 - rank)
    }


def trains_like_the_whole_model(rank, pp, fused_loss, scale_grads):
    modules = make_modules(rank, pp, fused_loss=fused_loss)
    schedule = make_schedule(modules, scale_grads=scale_grads)
    register(schedule)
    deferred = {}

    def watched(action, ctx):
        grads = modules[action.stage_index].weight_grads
        deferred[action.stage_index] = grads.has_deferred((action.stage_index, action.microbatch_index))
        backward_weight(action, ctx)

    schedule.register_custom_function(BACKWARD_WEIGHT, watched)
    pairs = [a for a in schedule.pipeline_order[rank] if a is not None and a.computation_type == OVERLAP_F_B]
    model = build_model(CONFIG, options=StageOptions(seed=SEED, fused_loss=fused_loss))
    of_pipeline = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=LR)
    of_model = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(3):
        x, y = batch(step)
        losses, expected = [], plain_step(model, step)
        Counting.overlapped = 0
        keep = step != 1
        inputs, target = ((x,), y) if rank == 0 else ((), None)
        outputs = schedule.step(*inputs, target=target, losses=losses, return_outputs=keep)
        assert Counting.overlapped == len(pairs) > 0
        if rank == 0:
            assert [loss.item() for loss in losses] == [loss.item() for loss in expected]
            assert len(schedule._stages[-1].output_chunks) == MICRO_BATCHES * keep
            if keep:
                assert torch.equal(outputs, torch.cat([model(part) for part in x.split(SIZE)]))
        whole = dict(model.named_parameters())
        for p in whole.values() if scale_grads else ():
            p.grad = p.grad / MICRO_BATCHES  # type: ignore[operator]
        for module in modules.values():
            assert module.weight_grads is not None and len(module.weight_grads) == 0
            for key, p in module.named_parameters():
                assert torch.equal(p.grad, whole[key].grad), f"gradient of {key} in step {step}"
        for optimizer in (of_pipeline, of_model):
            optimizer.step()
            optimizer.zero_grad()
        for module in modules.values():
            assert all(torch.equal(p, whole[key]) for key, p in module.named_parameters())
        assert schedule.backward_counter == dict.fromkeys(modules, MICRO_BATCHES)
        assert not any(name.endswith("_maybe_with_nosync") for stage in schedule._stages for name in vars(stage))
    return deferred


@runs_the_schedule
@pytest.mark.parametrize("fused_loss", [False, True])
@pytest.mark.parametrize("pp,deferred,scale_grads", [
    (1, [{0: False}], False), (2, [{0: False, 3: True}, {1: True, 2: True}], True)
])  # fmt: skip
@pytest.mark.quick("2-deferred1-True-True", "1-deferred0-False-False")
def test_training_is_bit_equal_to_the_single_process_model(pp, deferred, scale_grads, fused_loss):
    """Also: a W computes what its I deferred, except in the first stage, where the whole backward is in W."""
    assert run_ranks(pp, trains_like_the_whole_model, pp, fused_loss, scale_grads) == deferred


def wrong_usage(rank):
    modules = make_modules(rank, 1)
    pair = next(a for a in make_schedule(modules).pipeline_order[0] if a and a.computation_type == OVERLAP_F_B)

    def refused(error, match, modules=modules, action=pair, kwarg_mbs=None):
        ctx = SimpleNamespace(schedule_ref=make_schedule(modules), kwarg_mbs=kwarg_mbs)
        with pytest.raises(error, match=match):
            overlap_f_b(action, ctx)

    plain = {index: nn.Linear(2, 2) for index in modules}
    refused(TypeError, "stage 1 is a Linear, which is not Segmented: write it as a subclass", plain)
    ddp = {index: nn.parallel.DistributedDataParallel(module) for index, module in modules.items()}
    refused(TypeError, "stage 1 is a DistributedDataParallel: modules inside FSDP or DDP are not supported", ddp)
    refused(TypeError, "takes positional inputs only: got mask", kwarg_mbs=[{"mask": 1}] * MICRO_BATCHES)

    schedule = make_schedule(modules, shapes=False)
    register(schedule)
    x, y = batch(0)
    with pytest.raises(ValueError, match="give every PipelineStage its input_args and output_args"):
        schedule.step(x, target=y)


@runs_the_schedule
def test_wrong_usage_is_an_error():
    run_ranks(1, wrong_usage)
