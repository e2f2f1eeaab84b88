"""Attack the project at random for about 25 minutes, and print how often each promise held.

    make soak                                                     all attacks
    python -m tests.soak --seed 7                                 other random choices
    python -m tests.soak --only "killed rank" --first 3 --tries 1   repeat one try

Every try has its own random numbers, from the seed, the attack's name and the number of the try. The exit code is 1 if
a promise did not hold.
"""

import argparse
import sys

from .attack import Attack, repeat, table
from .commands import ATTACKS as COMMANDS
from .damaged_files import ATTACKS as DAMAGED_FILES
from .failing_runs import ATTACKS as FAILING_RUNS
from .full_disks import ATTACKS as FULL_DISKS
from .network import ATTACKS as NETWORK
from .random_runs import ATTACKS as RANDOM_RUNS

ATTACKS: tuple[Attack, ...] = (*FAILING_RUNS, *COMMANDS, *FULL_DISKS, *NETWORK, *DAMAGED_FILES, *RANDOM_RUNS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Random attacks, and how often each promise held.")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default 0)")
    names = "; ".join(attack.name for attack in ATTACKS)
    parser.add_argument("--only", action="append", metavar="NAME", help=f"run this attack only; repeatable: {names}")
    parser.add_argument("--first", type=int, default=0, help="number of the first try (default 0)")
    parser.add_argument("--tries", type=int, help="tries of each attack (default: each attack's own number)")
    args = parser.parse_args()
    if unknown := {*(args.only or ())} - {attack.name for attack in ATTACKS}:
        parser.error(f"no attack is called {', '.join(map(repr, sorted(unknown)))}: choose from {names}")
    outcomes = []
    for attack in ATTACKS:
        if args.only and attack.name not in args.only:
            continue
        tries = attack.tries if args.tries is None else args.tries
        outcomes.append(repeat(attack, args.seed, range(args.first, args.first + tries)))
        done = outcomes[-1]
        print(f"{attack.name}: {done.unable or f'{done.held} of {done.tried} held'}", flush=True)
    print(f"\nseed {args.seed}\n\n{table(outcomes)}")
    failed = sum(len(outcome.failures) for outcome in outcomes)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
