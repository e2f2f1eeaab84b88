"""Train on a Ray cluster: Ray Train starts the workers, and moe_dualpipe trains in them.

pip install 'moe-dualpipe[ray]'
python examples/ray_train.py                                          on this machine
ray job submit --working-dir . -- python examples/ray_train.py        on a cluster

If a worker or its machine is lost, Ray starts new workers, and the run resumes from its newest checkpoint.
"""

from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig  # pyright: ignore[reportMissingImports]
from ray.train.torch import TorchConfig, TorchTrainer  # pyright: ignore[reportMissingImports]

from moe_dualpipe import OptimizerConfig, TrainConfig, train
from moe_dualpipe.training import BatchConfig, CheckpointConfig, ParallelConfig, SampleConfig

WORKERS, GPUS = 2, False  # a worker is a process; GPUs: each has one
OUT = Path("runs/ray").absolute()  # checkpoints and metrics: a folder that all machines share
STEPS, SAVE_EVERY, RESTARTS = 40, 10, 3


def train_on_this_worker():
    saved = any(OUT.glob("checkpoints/step-*"))
    config = TrainConfig(
        preset="tiny",
        steps=STEPS,
        parallel=ParallelConfig(pp=WORKERS),
        batch=BatchConfig(seq_len=64, micro_batch_size=1),
        checkpoint=CheckpointConfig(out=str(OUT), resume=str(OUT) if saved else None, save_every=SAVE_EVERY),
        sample=SampleConfig(sample_tokens=0),
        optim=OptimizerConfig(warmup_steps=5),
    )
    train(config)  # in the process group that Ray has created


if __name__ == "__main__":
    TorchTrainer(
        train_on_this_worker,
        # CPU tensors need gloo, even between GPUs.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if GPUS else "gloo"),
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=GPUS),
        run_config=RunConfig(name="moe-dualpipe", failure_config=FailureConfig(max_failures=RESTARTS)),
    ).fit()
