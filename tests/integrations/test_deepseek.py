"""Programs written for DeepSeek's package run after changing only the import.

Each test is such a program: modules that use `WeightGradStore`, a criterion, inputs on the outer ranks, and losses and
outputs compared with a single process. The expectations are DeepSeek's documented behavior.
"""

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
from moe_dualpipe.models import ModelConfig, StageOptions, TransformerStage, build_model, split
from moe_dualpipe.overlap.segmented import engine_for
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
        output = nn.Sequential(*stages)(piece)
        loss = criterion(output, wanted)
        loss.backward()
        losses.append(loss.detach())
        outputs.append(output.detach())
    return torch.stack(losses), torch.cat(outputs)


def dualpipe_program(rank, kind, num_chunks, rank_mapping, subgroup):
    """`rank_mapping[i]`: pipeline rank of group rank i. `subgroup`: use ranks 1.. of the world."""
    torch.manual_seed(5)
    LOG.clear()
    group = dist.new_group(range(1, dist.get_world_size())) if subgroup else None
    if subgroup and rank == 0:
        return None
    size = dist.get_world_size() - subgroup
    group_rank = rank - subgroup
    pp_rank = rank_mapping[group_rank] if rank_mapping else group_rank
    set_p2p_tensor_shapes([(SIZE, WIDTH)])
    set_p2p_tensor_dtype(torch.float32)
    full = [kind() for _ in range(size)]
    x, target = torch.randn(num_chunks * SIZE, WIDTH), torch.randn(num_chunks * SIZE, WIDTH)
    loss_ref, output_ref = single_process(full, x, target, num_chunks)
    LOG.clear()

    mine = [full[pp_rank], full[size - 1 - pp_rank]]
    local = nn.Sequential(kind(), kind())
    for module, source in zip(local, mine, strict=True):
        module.load_state_dict(source.state_dict())
    model = DualPipe(local, process_group=group, rank_mapping=rank_mapping)
    assert model.overlapped_forward_backward == (kind is OverlappedStage)

    first, last = pp_rank == 0, pp_rank == size - 1
    own_x = x.chunk(2)[0] if first else x.chunk(2)[1] if last else None
    own_target = target.chunk(2)[1] if first else target.chunk(2)[0] if last else None
    loss, outputs = model.step(own_x, num_chunks=num_chunks, criterion=criterion, labels=(own_target,))
    assert outputs is None
    if first or last:
        assert torch.equal(loss, loss_ref.chunk(2)[1 if first else 0])
        assert not loss.requires_grad
    else:
        assert loss is None
    assert WeightGradStore.funcs_queue.empty()
    log = list(LOG)

    # Each stage lives on two mirrored ranks; together they saw all micro-batches.
    for own, (other_stage, source) in zip(local, [(1, mine[0]), (0, mine[1])], strict=True):
        mirror = rank_of(size - 1 - pp_rank, rank_mapping, size) + subgroup
        for (name, p), reference in zip(own.named_parameters(), source.parameters(), strict=True):
            theirs = torch.empty_like(p)
            sent = dict(local[other_stage].named_parameters())[name].grad
            if p.grad is None:
                assert reference.grad is None
                continue
            exchange(sent, theirs, mirror, group)
            assert cosine_distance(p.grad + theirs, reference.grad) < 1e-13, name

    model.zero_grad()
    with torch.no_grad():
        loss, outputs = model.step(
            own_x, num_chunks=num_chunks, criterion=criterion, labels=(own_target,), return_outputs=True
        )
    if first or last:
        assert torch.equal(loss, loss_ref.chunk(2)[1 if first else 0])
        assert torch.equal(outputs, output_ref.chunk(2)[1 if first else 0])
    else:
        assert (loss, outputs) == (None, None)
    assert all(p.grad is None for p in model.parameters())
    return log


def rank_of(pp_rank, rank_mapping, size):
    return (rank_mapping or list(range(size))).index(pp_rank)


def exchange(sent, received, peer, group):
    works = [dist.isend(sent.contiguous(), peer, group), dist.irecv(received, peer, group)]
    for work in works:
        work.wait()


@pytest.mark.parametrize("kind", [PlainStage, StoreStage, OverlappedStage])
@pytest.mark.parametrize("size,num_chunks", [(2, 4), (4, 10)])
@pytest.mark.quick("2-4-PlainStage", "4-10-StoreStage", "4-10-OverlappedStage")
def test_a_dualpipe_program(kind, size, num_chunks):
    logs = run_ranks(size, dualpipe_program, kind, num_chunks, None, False)
    for log, actions in zip(logs, build("dualpipe", size, num_chunks).actions, strict=True):
        pairs = [action for action in actions if isinstance(action, Overlap)]
        deferred = [action for action in actions if isinstance(action, Backward) and action.part is Part.INPUT]
        assert log.count("overlap") == (len(pairs) if kind is OverlappedStage else 0)
        if kind is not PlainStage:  # two linear layers a stage, num_chunks backwards a rank
            assert log.count("W") == 2 * num_chunks
            assert log.count("put") == 2 * len(deferred) > 0


def test_a_dualpipe_program_with_rank_mapping():
    run_ranks(4, dualpipe_program, StoreStage, 10, [2, 0, 3, 1], False)


def test_a_dualpipe_program_on_a_process_subgroup():
    assert run_ranks(3, dualpipe_program, OverlappedStage, 6, None, True)[0] is None


class TwoTensorStage(nn.Module):
    """Several inputs and outputs; one output is not always used."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        return self.mix(x) + y, y.tanh()


def two_criterion(x, y, target, weight):
    return (weight * (x - target).square()).mean() + y.mean()


def dualpipev_program(rank, size, num_chunks):
    torch.manual_seed(7)
    set_p2p_tensor_shapes([(SIZE, WIDTH), (SIZE, WIDTH)])
    set_p2p_tensor_dtype(torch.float64)
    full = [TwoTensorStage().double() for _ in range(2 * size)]
    x, y, target, weight = (torch.randn(num_chunks * SIZE, WIDTH, dtype=torch.float64) for _ in range(4))
    losses = []
    for pieces in zip(*(t.chunk(num_chunks) for t in (x, y, target, weight)), strict=True):
        outputs = pieces[:2]
        for stage in full:
            outputs = stage(*outputs)
        loss = two_criterion(*outputs, *pieces[2:])
        loss.backward()
        losses.append((loss.detach(), *(o.detach() for o in outputs)))
    references = [[p.grad.clone() for p in full[s].parameters()] for s in (rank, 2 * size - 1 - rank)]
    local = (full[rank], full[2 * size - 1 - rank])
    for module in local:
        module.zero_grad()

    model = DualPipeV(local)
    inputs, labels = ((x, y), (target, weight)) if rank == 0 else ((None, None), (None, None))
    loss, outputs = model.step(
        *inputs, num_chunks=num_chunks, criterion=two_criterion, labels=labels, return_outputs=True
    )
    if rank == 0:
        assert torch.equal(loss, torch.stack([row[0] for row in losses]))
        assert isinstance(outputs, tuple)
        for i, output in enumerate(outputs):
            assert torch.equal(output, torch.cat([row[1 + i] for row in losses]))
    else:
        assert (loss, outputs) == (None, None)
    for module, expected in zip(local, references, strict=True):
        for p, grad in zip(module.parameters(), expected, strict=True):
            assert cosine_distance(p.grad, grad) < 1e-13
    return [sorted(model.state_dict())[0], model.rank, model.is_first_rank, model.is_last_rank]


@pytest.mark.parametrize("size,num_chunks", [(1, 2), (2, 5), (3, 6)])
def test_a_dualpipev_program_with_several_inputs_and_labels(size, num_chunks):
    seen = run_ranks(size, dualpipev_program, size, num_chunks)
    assert seen == [["module.0.mix.bias", rank, rank == 0, rank == size - 1] for rank in range(size)]


class WithNone(nn.Module):
    def forward(self, x, nothing=None):
        assert nothing is None
        return x + 1, None


def inference_with_none(rank):
    set_p2p_tensor_shapes([(SIZE, WIDTH)])
    set_p2p_tensor_dtype(torch.float32)
    model = DualPipeV((WithNone(), WithNone()))
    x = torch.zeros(4 * SIZE, WIDTH) if rank == 0 else None
    with torch.no_grad():
        loss, outputs = model.step(x, num_chunks=4, return_outputs=True)
    assert loss is None
    if rank == 0:
        assert torch.equal(outputs[0], torch.full((4 * SIZE, WIDTH), 4.0))
        assert outputs[1] is None


def test_a_none_among_the_outputs_is_not_sent():
    run_ranks(2, inference_with_none)


def changed_after_construction(_rank):
    set_p2p_tensor_shapes([(SIZE, WIDTH)])
    set_p2p_tensor_dtype(torch.float32)
    model = DualPipeV((OverlappedStage(), OverlappedStage()))
    assert (model.first_rank, model.last_rank, model.prev_rank, model.next_rank) == (0, 0, None, None)
    x = torch.randn(4 * SIZE, WIDTH)
    LOG.clear()
    model.overlapped_forward_backward = False
    model.step(x, num_chunks=4, criterion=criterion, labels=x)  # a single tensor instead of a sequence
    assert "overlap" not in LOG
    assert not model.forward_only
    model.module[0] = PlainStage()
    loss, _ = model.step(x, num_chunks=4, criterion=criterion, labels=[x])
    expected = single_process(model.module, x, x, 4)[0]
    assert torch.equal(loss, expected)


def test_modules_and_flags_may_change_after_construction():
    run_ranks(1, changed_after_construction)


def neighbors(rank, order):
    model = DualPipe((PlainStage(), PlainStage()), rank_mapping=order)
    assert model.rank == order[rank]
    assert model.is_middle_rank == (model.rank in (1, 2))
    assert model.is_in_second_half == (model.rank >= 2)

    def at(pp_rank):
        return order.index(pp_rank) if 0 <= pp_rank < 4 else None

    assert (model.first_rank, model.last_rank) == (at(0), at(3))
    assert (model.prev_rank, model.next_rank) == (at(model.rank - 1), at(model.rank + 1))


def test_neighbors_are_ranks_of_the_group():
    run_ranks(4, neighbors, [2, 0, 3, 1])


def other_batch_dim(rank):
    set_p2p_tensor_shapes([(3, 2)])
    set_p2p_tensor_dtype(torch.float32)
    model = DualPipeV((nn.Tanh(), nn.Tanh()), batch_dim=1)
    x = torch.randn(3, 8)
    with torch.no_grad():
        _, outputs = model.step(x if rank == 0 else None, num_chunks=4, return_outputs=True)
    if rank == 0:
        assert torch.equal(outputs, x.tanh().tanh().tanh().tanh())
        with pytest.raises(ValueError, match="a batch of 9 cannot be divided evenly into 4 micro-batches"):
            model.step(torch.randn(3, 9), num_chunks=4, criterion=torch.sum)


def test_micro_batches_along_another_dimension():
    run_ranks(2, other_batch_dim)


class Exploding(StoreStage):
    def forward(self, x):
        y = super().forward(x)
        y.register_hook(self.explode)
        return y

    def explode(self, _):
        if WeightGradStore.enabled:
            WeightGradStore.put(lambda: None)
            raise ArithmeticError("boom")


def store_after_a_failure(_rank):
    set_p2p_tensor_shapes([(SIZE, WIDTH)])
    set_p2p_tensor_dtype(torch.float32)
    x = torch.randn(2 * SIZE, WIDTH)
    WeightGradStore.put(lambda: pytest.fail("left by an earlier step"))
    WeightGradStore.flush()
    DualPipeV((StoreStage(), StoreStage())).step(x, num_chunks=2, criterion=criterion, labels=(x,))
    with pytest.raises(ArithmeticError, match="boom"):
        DualPipeV((Exploding(), Exploding())).step(x, num_chunks=2, criterion=criterion, labels=(x,))
    assert not WeightGradStore.enabled
    assert WeightGradStore.cache == []
    assert WeightGradStore.funcs_queue.empty()


def test_the_store_is_empty_before_and_after_a_step_even_a_failed_one():
    run_ranks(1, store_after_a_failure)


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


def wrong_programs(_rank):
    set_p2p_tensor_shapes([(SIZE, WIDTH)])
    with pytest.raises(ValueError, match="call set_p2p_tensor_shapes and set_p2p_tensor_dtype"):
        step()
    set_p2p_tensor_dtype(torch.float32)
    for program, message in WRONG:
        with pytest.raises(ValueError, match=message):
            program()
    with torch.no_grad():
        assert step(criterion=None, labels=None, return_outputs=True)[0] is None


def test_errors_of_wrong_programs_say_what_to_change():
    run_ranks(1, wrong_programs)


TINY = ModelConfig(
    vocab_size=19, hidden_size=16, num_layers=4, num_dense_layers=1, num_heads=4, num_kv_heads=2, head_dim=4,
    dense_size=24, expert_size=12, num_experts=4, experts_per_token=2, init_std=0.2,
)  # fmt: skip


def our_transformer_in_dualpipe(rank, num_chunks, fused_loss):
    """Our stages under DeepSeek's interface: pairs are interleaved; losses and gradients are those of one process."""
    specs, x = split(TINY, 2), torch.randint(19, (num_chunks, 7), generator=torch.Generator().manual_seed(3))
    model = build_model(TINY, options=StageOptions(seed=4, fused_loss=fused_loss))
    losses = [model.loss(model(piece), piece) for piece in x.split(1)]
    sum(losses, torch.zeros(())).backward()
    stages = [
        TransformerStage(TINY, specs[stage], options=StageOptions(seed=4, fused_loss=fused_loss))
        for stage in (rank, 1 - rank)
    ]
    criterion = stages[1 - rank].loss  # of stage 1
    set_p2p_tensor_shapes([(1, 7, 16)])
    set_p2p_tensor_dtype(torch.float32)
    log = engine_for(torch.device("cpu")).log = []
    pipe = DualPipe(nn.Sequential(*stages))
    half = x.chunk(2)
    loss, _ = pipe.step(half[rank], num_chunks=num_chunks, criterion=criterion, labels=[half[1 - rank]])
    engine_for(torch.device("cpu")).log = None
    assert log.count("loss(F)") > 0 and log.count("mlp(W)") > 0
    assert torch.equal(loss, torch.stack(losses).detach().chunk(2)[1 - rank])
    grads = {name: p.grad for name, p in model.named_parameters()}
    # Each stage is on both ranks, as the first module of the one and the second of the other.
    for order in (stages, stages[::-1]):
        named = dict(sorted(order[rank].named_parameters()))
        for name, p in named.items():
            dist.all_reduce(p.grad)
            assert cosine_distance(p.grad, grads[name]) < 1e-13, name


@pytest.mark.parametrize("num_chunks,fused_loss", [(4, False), (8, False), (8, True)])
@pytest.mark.quick("4-False", "8-True")
def test_our_transformer_overlaps_under_deepseeks_interface(num_chunks, fused_loss):
    run_ranks(2, our_transformer_in_dualpipe, num_chunks, fused_loss)
