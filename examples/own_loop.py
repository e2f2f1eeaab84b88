"""Your own training loop, in one process or over a pipeline of several.

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py
"""

from moe_dualpipe import (
    Numerics,
    OptimizerConfig,
    Pipeline,
    build_schedule,
    join_world,
    learning_rate,
    load_data,
    preset,
)  # fmt: skip

STEPS, SEQ_LEN, SIZE, MICRO_BATCHES = 10, 64, 1, 8
SOURCE = "stdlib"  # any text; this is the source code of Python's standard library

with join_world() as world:
    name = "dualpipe" if world.size % 2 == 0 else "dualpipev"
    schedule = build_schedule(name, world.size, MICRO_BATCHES)
    pipeline = Pipeline(preset("tiny"), schedule, (SIZE, SEQ_LEN), numerics=Numerics(world.device))
    config = OptimizerConfig(warmup_steps=5)
    optimizer = pipeline.optimizer(config)
    data = load_data(SOURCE, SEQ_LEN)
    for step in range(STEPS):
        batch = data.batch(seed=0, step=step, count=SIZE * MICRO_BATCHES, seq_len=SEQ_LEN)
        losses = pipeline.step(*batch)  # forward and backward of all micro-batches
        mean = 1 / pipeline.num_micro_batches
        norm = pipeline.sum_gradients() * mean
        optimizer.step(learning_rate(config, step, STEPS), mean / norm.clamp(min=1.0))
        pipeline.balance_experts(rate=3e-3)
        loss = pipeline.mean_loss(losses)
        if world.rank == 0:
            print(f"step {step + 1}: loss {loss:.4f}, gradient norm {norm:.3f}", flush=True)
