"""Faults of every kind, again and again, against a cluster under load: is every answer right, and does all come back?

    python -m benchmarks faults [--rounds 50] [--fault "bit flipped" ...] [--models DIR ...]

A row is one kind of fault, each round of it a fault that met an open session (`missed` did not, and were repeated); the
models take an equal part of the rounds each, in clusters of their own.
`right` answers equal those of the undisturbed cluster, token for token; `moved` are those of them that went on at
another decode node; an error is said to the client; a wrong answer, HTTP 200 with other tokens, ends this with
status 1. `dropped` parts came when nobody expected them any more. The times are from the fault until a survivor's
session had failed: until it knew. With killed nodes each session counts that was open; of a cut network each that
failed, from its own beginning if that was later than the cut; otherwise a round's first.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.support.cluster.fault_campaign import SCENARIOS, Row, run, table

MODELS = [
    Path(__file__).parents[1] / "tiny_models" / name for name in ("headrace-tiny-qwen3.5", "headrace-tiny-granite-h")
]


def shares(whole: int, parts: int) -> list[int]:
    return [whole // parts + (part < whole % parts) for part in range(parts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--fault", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--models", nargs="+", type=Path, default=MODELS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.fault:
        row = Row(name)
        for model, rounds in zip(arguments.models, shares(arguments.rounds, len(arguments.models)), strict=True):
            with tempfile.TemporaryDirectory() as folder:
                row += asyncio.run(run(name, model, Path(folder), rounds=rounds, seed=arguments.seed))
        rows.append(row)
        print(table([row]), flush=True)
        for error, count in row.errors.items():
            print(f"  {count} errors: {error}")
        for wrong in row.wrong:
            print(f"  WRONG: {wrong}")
    print("\n" + table(rows))
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
