"""Attack runs and files at random for about 20 minutes, and print how often each promise held.

    make soak                                                     all attacks
    python -m tests.soak --seed 7                                 other random choices
    python -m tests.soak --only "killed rank" --first 3 --tries 1   repeat one try

Every try has its own random numbers, from the seed, the attack's name and the number of the try. The exit code is 1 if
a promise did not hold.
"""

import argparse
import sys

from .attack import Attack, repeat
from .damaged_files import damaged_checkpoint, damaged_tokens, random_text
from .failing_runs import few_descriptors, freeze, full_disk, kill, stop
from .random_runs import random_run

ATTACKS = (
    Attack("killed rank", "the other rank names it; no broken checkpoint; the resumed run is bit-equal", 40, kill),
    Attack("signal", "a checkpoint and exit code 0; the resumed run is bit-equal", 20, stop),
    Attack("frozen rank", "the other rank names it and ends", 8, freeze),
    Attack("full disk", "training goes on; no broken checkpoint; exit code 1 without the last one", 12, full_disk),
    Attack("few file descriptors", "trains and saves, or says so without a traceback", 12, few_descriptors),
    Attack("damaged checkpoint", "refused in one line that names the file", 300, damaged_checkpoint),
    Attack("damaged token ids", "refused in one line, or the same batches", 200, damaged_tokens),
    Attack("random text", "trains, or refused in one line within 10 s", 200, random_text),
    Attack("random options", "bit-equal without overlap and resumed; the same loss in any layout", 30, random_run),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Random attacks, and how often each promise held.")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default 0)")
    names = [attack.name for attack in ATTACKS]
    parser.add_argument("--only", action="append", choices=names, help="run this attack only; repeatable")
    parser.add_argument("--first", type=int, default=0, help="number of the first try (default 0)")
    parser.add_argument("--tries", type=int, help="tries of each attack (default: each attack's own number)")
    args = parser.parse_args()
    outcomes = []
    for attack in ATTACKS:
        if attack.name in (args.only or names):
            tries = attack.tries if args.tries is None else args.tries
            outcomes.append(repeat(attack, args.seed, range(args.first, args.first + tries)))
            print(outcomes[-1], flush=True)
    print(f"\nseed {args.seed}\n\n| attack | promise | tried | held | failed | minutes |\n|---|---|---|---|---|---|")
    print(*outcomes, sep="\n")
    sys.exit(1 if any(outcome.failures for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()
