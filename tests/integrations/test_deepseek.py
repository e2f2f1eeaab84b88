"""Programs written for DeepSeek's package run after changing only the import.

Each test is such a program: modules that use `WeightGradStore`, a criterion, inputs on the outer ranks, and losses and
outputs compared with a single process. The expectations are DeepSeek's documented behavior.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from moe_dualpipe.deepseek import (
    DualPipe,
    DualPipeV,
    WeightGradStore,
    run_backward,
    set_p2p_tensor_dtype,
    set_p2p_tensor_shapes,
)
from moe_dualpipe.schedule import Backward, Overlap, Part, build
from tests.support.ranks import cosine_distance, run_ranks

SIZE, WIDTH = 3, 8


class StoreLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, *grads):
        x, weight = ctx.saved_tensors

        def add_weight_grad():
            LOG.append("W")
            grad = grads[0].T @ x
            weight.grad = grad if weight.grad is None else weight.grad + grad

        if WeightGradStore.enabled:
            LOG.append("put")
            WeightGradStore.put(add_weight_grad)
        else:
            add_weight_grad()
        return grads[0] @ weight, None


LOG: list[str] = []


class PlainStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


class StoreStage(PlainStage):
    def forward(self, x):
        h = F.gelu(StoreLinearFunction.apply(x, self.first.weight))
        return StoreLinearFunction.apply(h, self.second.weight)


class OverlappedStage(StoreStage):
    """Defines the method that DeepSeek leaves to the user, and checks what it is given."""

    @classmethod
    def overlapped_forward_backward(
        cls, module0, inputs0, criterion0, labels0, module1, loss1, outputs1, output_grads1
    ):
        LOG.append("overlap")
        assert module0 is not module1
        assert isinstance(inputs0, list)
        assert (criterion0 is None) == (len(labels0) == 0)
        outputs0 = module0(*inputs0)
        loss0 = criterion0(outputs0, *labels0) if criterion0 is not None else None
        if loss1 is not None:
            assert len(outputs1) == len(output_grads1) == 0
            loss1.backward()
            loss1.detach_()
        else:
            assert [o.shape for o in outputs1] == [g.shape for g in output_grads1]
            run_backward(outputs1, output_grads1)
        return [outputs0], loss0


def criterion(output, target):
    return F.mse_loss(output, target).clone()


def single_process(stages, x, target, num_chunks):
    losses, outputs = [], []
    for piece, wanted in zip(x.chunk(num_chunks), target.chunk(num_chunks), strict=True):
        outputs.append(nn.Sequential(*stages)(piece))
        losses.append(criterion(outputs[-1], wanted))
        losses[-1].backward()
    return torch.stack(losses).detach(), torch.cat(outputs).detach()


def dualpipe_program(rank, kind, num_chunks, rank_mapping, subgroup):
    """`rank_mapping[i]`: pipeline rank of group rank i. `subgroup`: use ranks 1.. of the world."""
    torch.manual_seed(5)
    group = dist.new_group(range(1, dist.get_world_size())) if subgroup else None
    if subgroup and rank == 0:
        return None
    size = dist.get_world_size() - subgroup
    order = rank_mapping or [*range(size)]
    pp_rank = order[rank - subgroup]
    set_p2p_tensor_shapes([(SIZE, WIDTH)])
    set_p2p_tensor_dtype(torch.float32)
    full = [kind() for _ in range(size)]
    x, target = torch.randn(num_chunks * SIZE, WIDTH), torch.randn(num_chunks * SIZE, WIDTH)
    loss_ref, output_ref = single_process(full, x, target, num_chunks)
    LOG.clear()

    held = {stage: copy.deepcopy(full[stage]) for stage in (pp_rank, size - 1 - pp_rank)}
    model = DualPipe(nn.Sequential(*held.values()), process_group=group, rank_mapping=rank_mapping)
    model.zero_grad()
    assert model.overlapped_forward_backward == (kind is OverlappedStage)
    neighbors = {place: order.index(place) for place in range(size)}
    assert (model.rank, model.first_rank, model.last_rank) == (pp_rank, neighbors[0], neighbors[size - 1])
    assert (model.prev_rank, model.next_rank) == (neighbors.get(pp_rank - 1), neighbors.get(pp_rank + 1))
    assert (model.is_middle_rank, model.is_in_second_half) == (
        pp_rank in (size // 2 - 1, size // 2),
        pp_rank >= size // 2,
    )

    # The first rank has the first half of the inputs, and computes the losses of the second.
    halves = {0: (0, 1), size - 1: (1, 0)}
    own_x, own_target = (half.chunk(2)[i] for half, i in zip((x, target), halves.get(pp_rank, (0, 0)), strict=True))
    if pp_rank not in halves:
        own_x = own_target = None
    options = {"num_chunks": num_chunks, "criterion": criterion, "labels": (own_target,)}
    expected = [t.chunk(2)[halves[pp_rank][1]] for t in (loss_ref, output_ref)] if pp_rank in halves else [None, None]
    loss, outputs = model.step(own_x, **options)
    assert outputs is None
    assert loss is expected[0] or (torch.equal(loss, expected[0]) and not loss.requires_grad)
    assert WeightGradStore.funcs_queue.empty()
    log = [*LOG]
    for stage, source in enumerate(full):  # each stage is on two ranks; together they saw all micro-batches
        for name, reference in source.named_parameters():
            if reference.grad is not None:
                grad = held[stage].get_parameter(name).grad if stage in held else torch.zeros_like(reference)
                dist.all_reduce(grad, group=group)
                assert cosine_distance(grad, reference.grad) < 1e-13, name

    model.zero_grad()
    with torch.no_grad():
        found = model.step(own_x, **options, return_outputs=True)
    assert all(ours is wanted or torch.equal(ours, wanted) for ours, wanted in zip(found, expected, strict=True))
    assert all(p.grad is None for p in model.parameters())
    return log


@pytest.mark.parametrize("kind,size,num_chunks,rank_mapping,subgroup", [
    (PlainStage, 4, 8, None, False), (StoreStage, 4, 10, [2, 0, 3, 1], False), (OverlappedStage, 2, 6, None, True),
], ids=["plain", "store", "overlapped"])  # fmt: skip
@pytest.mark.quick("store", "overlapped")
def test_a_dualpipe_program(kind, size, num_chunks, rank_mapping, subgroup):
    logs = run_ranks(size + subgroup, dualpipe_program, kind, num_chunks, rank_mapping, subgroup)
    order = rank_mapping or range(size)
    for log, place in zip(logs[subgroup:], order, strict=True):
        actions = build("dualpipe", size, num_chunks).actions[place]
        pairs = [action for action in actions if isinstance(action, Overlap)]
        deferred = [action for action in actions if isinstance(action, Backward) and action.part is Part.INPUT]
        assert log.count("overlap") == (len(pairs) if kind is OverlappedStage else 0)
        if kind is not PlainStage:  # two linear layers a stage, num_chunks backwards a rank
            assert log.count("W") == 2 * num_chunks
            assert log.count("put") == 2 * len(deferred) > 0


class TwoTensorStage(nn.Module):
    """Several inputs and outputs; one output is not always used. A None among the outputs is not sent."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y, nothing=None):
        assert nothing is None
        return self.mix(x) + y, y.tanh(), None


def two_criterion(x, y, _nothing, target, weight):
    return (weight * (x - target).square()).mean() + y.mean()


def dualpipev_program(rank, size, num_chunks):
    """Micro-batches are along the second dimension."""
    torch.manual_seed(7)
    set_p2p_tensor_shapes([(2, SIZE, WIDTH), (2, SIZE, WIDTH)])
    set_p2p_tensor_dtype(torch.float64)
    full = [TwoTensorStage().double() for _ in range(2 * size)]
    local = copy.deepcopy((full[rank], full[2 * size - 1 - rank]))
    tensors = [torch.randn(2, num_chunks * SIZE, WIDTH, dtype=torch.float64) for _ in range(4)]
    expected = []
    for pieces in zip(*(t.chunk(num_chunks, 1) for t in tensors), strict=True):
        outputs = pieces[:2]
        for stage in full:
            outputs = stage(*outputs)
        loss = two_criterion(*outputs, *pieces[2:])
        loss.backward()
        expected.append((loss.detach(), *(o.detach() for o in outputs[:2])))
    model = DualPipeV(local, batch_dim=1)
    inputs, labels = (tensors[:2], tensors[2:]) if rank == 0 else ((None, None), (None, None))
    loss, outputs = model.step(
        *inputs, num_chunks=num_chunks, criterion=two_criterion, labels=labels, return_outputs=True
    )
    if rank == 0:
        losses, *wanted = zip(*expected, strict=True)
        assert torch.equal(loss, torch.stack(losses))
        assert all(torch.equal(o, torch.cat(w, 1)) for o, w in zip(outputs[:2], wanted, strict=True))
        assert outputs[2] is None
    else:
        assert (loss, outputs) == (None, None)
    for module, stage in zip(local, (rank, 2 * size - 1 - rank), strict=True):
        for p, q in zip(module.parameters(), full[stage].parameters(), strict=True):
            assert cosine_distance(p.grad, q.grad) < 1e-13
    return sorted(model.state_dict())[0], model.rank, model.is_first_rank, model.is_last_rank


@pytest.mark.parametrize("size,num_chunks", [(1, 2), (3, 7)])
def test_a_dualpipev_program_with_several_inputs_and_labels(size, num_chunks):
    seen = run_ranks(size, dualpipev_program, size, num_chunks)
    assert seen == [("module.0.mix.bias", rank, rank == 0, rank == size - 1) for rank in range(size)]


# ---- On one rank ----


class Exploding(StoreStage):
    def forward(self, x):
        y = super().forward(x)
        y.register_hook(self.explode)
        return y

    def explode(self, _):
        if WeightGradStore.enabled:
            WeightGradStore.put(lambda: None)
            raise ArithmeticError("boom")


def plain_pair(**options):
    return DualPipeV((PlainStage(), PlainStage()), **options)


def step(size=4 * SIZE, **options):
    x = torch.randn(size, WIDTH)
    return plain_pair().step(x, **{"num_chunks": 4, "criterion": criterion, "labels": (x,)} | options)


WRONG = [
    (lambda: step(num_chunks=1), "got 1 for 1 rank"),
    (lambda: step(criterion=None), "needs a criterion to train"),
    (lambda: step(2), "a batch of 2 cannot be divided evenly into 4 micro-batches"),
    (lambda: DualPipeV((PlainStage(),) * 3), "needs two modules on every rank: got 3"),  # type: ignore[arg-type]
    (lambda: DualPipe((PlainStage(), PlainStage())), "even number of pipeline ranks: got 1"),
    (lambda: plain_pair(rank_mapping=[1]), "permutation"),
    (lambda: set_p2p_tensor_shapes((SIZE, WIDTH)), "takes a list of shapes, one per tensor"),  # type: ignore[arg-type]
]


def on_one_rank(_rank):
    set_p2p_tensor_shapes([(SIZE, WIDTH)])
    with pytest.raises(ValueError, match="call set_p2p_tensor_shapes and set_p2p_tensor_dtype"):
        step()
    set_p2p_tensor_dtype(torch.float32)
    for program, message in WRONG:
        with pytest.raises(ValueError, match=message):
            program()
    # The store is empty before and after a step, even a failed one.
    x = torch.randn(2 * SIZE, WIDTH)
    WeightGradStore.put(lambda: pytest.fail("left by an earlier step"))
    WeightGradStore.flush()
    DualPipeV((StoreStage(), StoreStage())).step(x, num_chunks=2, criterion=criterion, labels=(x,))
    with pytest.raises(ArithmeticError, match="boom"):
        DualPipeV((Exploding(), Exploding())).step(x, num_chunks=2, criterion=criterion, labels=(x,))
    assert not WeightGradStore.enabled and WeightGradStore.cache == [] and WeightGradStore.funcs_queue.empty()


def test_errors_of_wrong_programs_say_what_to_change_and_no_step_depends_on_an_earlier_one():
    run_ranks(1, on_one_rank)
