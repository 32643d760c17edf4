"""Ten thousand hand-overs in a row between two processes: nothing that a process holds may grow.

    python -m benchmarks soak [--sessions 10000] [--devices cuda:0 cuda:1]

One session in ten is cancelled, its messages all come late. The first sample is after the warm-up, a fifth of all
sessions. Ends with status 1 when anything grew: files, threads, mappings, GPU memory, endpoints, operations, staging,
nonces or tasks by one, or memory by more than `tests.support.cluster.soak.MAX_GROWTH_KIB`.
"""

import argparse
import sys
import time
from dataclasses import asdict

from tests.support.cluster.soak import grown, rss_growth_kib, soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--devices", nargs=2, default=["cpu", "cpu"], help="of the sender and of the receiver")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    sender, receiver = arguments.devices
    sides = soak(arguments.sessions, devices=(sender, receiver))
    print(f"{arguments.sessions} sessions in {time.monotonic() - began_s:.0f} s")
    for side, samples in sides.items():
        print(f"\n{side} (memory grew by {rss_growth_kib(samples):.0f} KiB)")
        print("".join(f"{name:>14}" for name in asdict(samples[0])))
        for sample in samples:
            print("".join(f"{count:>14}" for count in asdict(sample).values()))
    found = [f"{side}: {what}" for side, samples in sides.items() for what in grown(samples)]
    print("\n".join(["", *(f"GREW {what}" for what in found)] if found else ["\nnothing grew"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
