"""`moe-dualpipe train`: the command train.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Train:
    """Train a Mixture-of-Experts transformer, as train.py does."""

    # cli.py passes on the options before this class is built: training/main.py handles signals before it parses them.

    def run(self) -> None:
        from ..training.main import main

        main([])
