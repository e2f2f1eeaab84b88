"""Encode a large corpus on many machines: datatrove starts the tasks, and each writes some of the shards.

pip install 'moe-dualpipe[bpe,data]' datatrove
python examples/prepare_on_cluster.py /shared/corpus some/tokenizer.json '/shared/crawl/*.jsonl.zst'
moe-dualpipe data prepare '/shared/crawl/*.jsonl.zst' --out /shared/corpus --tokenizer some/tokenizer.json

The last command joins the shards, and encodes those that are missing. All machines see the same files, at the same
paths. This script runs TASKS on this machine; datatrove's SlurmPipelineExecutor takes the same pipeline.
"""

import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor  # pyright: ignore[reportMissingImports]
from datatrove.pipeline.base import PipelineStep  # pyright: ignore[reportMissingImports]

from moe_dualpipe.data import open_shards, read_tokenizer

TASKS, WORKERS = 8, 2


class WriteShards(PipelineStep):
    """Write the unfinished shards of a task."""

    def __init__(self, out: str, tokenizer: str, sources: list[str]):
        super().__init__()
        self.out, self.tokenizer, self.sources = Path(out), Path(tokenizer), sources

    def run(self, data=None, rank: int = 0, world_size: int = 1):
        writer, shards = open_shards(self.sources, self.out, read_tokenizer(self.tokenizer))
        for shard in shards[rank::world_size]:
            writer.write(shard)
        return data


if __name__ == "__main__":
    out, tokenizer, *sources = sys.argv[1:]
    pipeline: list = [WriteShards(out, tokenizer, sources)]
    LocalPipelineExecutor(pipeline, tasks=TASKS, workers=WORKERS, logging_dir=f"{out}.log").run()
