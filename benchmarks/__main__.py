"""`headrace bench NAME`: runs one benchmark; what it prints are ratios from one run."""

import runpy
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]

BENCHMARKS = {
    "admission": ("benchmarks.admission", "what proving a hand-over's messages costs"),
    "cache-costs": ("benchmarks.cache_costs", "the cache's own work: hashing, matching, publishing, evicting"),
    "cache-table": ("benchmarks.cache_table", "hit rates of checkpoint and eviction policies on request traces"),
    "cache-updates": ("benchmarks.cache_updates", "following a cache of a million blocks"),
    "cpu-engine": ("benchmarks.cpu_engine", "the forward pass against transformers"),
    "cpu-cluster": ("benchmarks.cpu_cluster", "router and two nodes against the engine alone"),
    "emission": ("benchmarks.emission", "a prefill with many checkpoints against one"),
    "gpu-cluster": ("benchmarks.gpu_cluster", "a prefill and a decode GPU, over HTTP, beside one GPU that does both"),
    "faults": ("benchmarks.faults", "a cluster whose nodes and network fail under load"),
    "gpu-engine": ("benchmarks.gpu_engine", "prefill and decode on a GPU beside vLLM and the chip's floor"),
    "gpu-start": ("benchmarks.gpu_start", "from process start to the first token over HTTP, on one GPU"),
    "gpu-steps": ("benchmarks.gpu_steps", "decode steps through the whole engine on a GPU"),
    "host-overhead": ("benchmarks.host_overhead", "what the hosts do for a cached prompt, stage by stage"),
    "fetching": ("benchmarks.fetching", "a chat whose prefill node learns from the decode node, or does not"),
    "transfer-gpu": ("benchmarks.transfer_gpu", "a hand-over between two GPUs, its parts, and NIXL beside it"),
    "soak": ("benchmarks.soak", "ten thousand hand-overs in a row, and what the processes hold"),
    "transfer-cpu": ("benchmarks.transfer_cpu", "a hand-over between two processes against a memcpy"),
}


def main(argv: list[str] | None = None) -> int:
    """Passes the remaining arguments on; the process's exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] not in BENCHMARKS:
        for name, (_, what) in BENCHMARKS.items():
            print(f"headrace bench {name:<14} {what}")
        return 0 if not arguments or arguments[0] in ("-h", "--help") else 2
    # The benchmarks run on the tests' random models and clusters, which are no installed package.
    if not (REPOSITORY / "tests" / "support").is_dir():
        print(f"{REPOSITORY} has no tests/support: run benchmarks from a clone of the repository", file=sys.stderr)
        return 2
    sys.path.insert(0, str(REPOSITORY))
    module = BENCHMARKS[arguments[0]][0]
    sys.argv = [f"headrace bench {arguments[0]}", *arguments[1:]]
    runpy.run_module(module, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
