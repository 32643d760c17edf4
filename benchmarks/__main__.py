"""`python -m benchmarks NAME`: runs one benchmark, from a clone of the repository. Ratios are of one run."""

import sys
from importlib import import_module

import typer

BENCHMARKS = {
    "cache-table": ("cache.replay", "hit rates of checkpoint and eviction policies on request traces"),
    "cache-costs": ("cache.costs", "the cache's own work: hashing, matching, publishing, evicting"),
    "cache-updates": ("cache.costs:updates", "a router that follows a cache of a million blocks"),
    "router": ("router.simulate", "routing policies on request traces and agents' chats, simulated"),
    "router-arrangements": ("router.arrangements", "agents' chats on nodes of known costs, simulated"),
    "router-decision": ("router.decision", "the router's own work for one decision"),
    "router-commits": ("router.commits", "processor time of the router for a streamed chat, at two commits"),
    "router-streams": ("router.streams", "processor time of the router for many answers that stream at once"),
    "prompt-path": ("router.prompt_path", "event-loop time of a long prompt, and collections beside many"),
    "cpu-engine": ("engine.cpu", "the forward pass against transformers"),
    "emission": ("engine.steps:emission", "a prefill with many checkpoints against one"),
    "host-overhead": ("engine.host_overhead", "host work for a cached prompt, stage by stage"),
    "engine-host": ("engine.host_turns", "the host's part of a decode node's turns, at one or more commits"),
    "gpu-engine": ("engine.gpu", "prefill and decode on a GPU beside vLLM and the chip's floor"),
    "gpu-steps": ("engine.steps", "decode steps through the whole engine on a GPU"),
    "structured-output": ("engine.structured_output", "which JSON schemas are held, and what a mask costs"),
    "structured-decode": ("engine.structured_output:decode", "decode steps with grammars beside those without"),
    "gpu-speculation": ("engine.speculation", "decoding with drafts beside plain decoding, acceptance pinned"),
    "step-costs": ("engine.step_costs", "how well an engine's own step costs predict its steps"),
    "step-profile": ("engine.step_profile", "steps of a busy engine that take longer than their contents cost"),
    "cpu-cluster": ("cluster.cpu", "router and two nodes against the engine alone"),
    "fetching": ("cluster.cpu:fetching", "a chat whose prefill node fetches from the decode node, or computes"),
    "gpu-cluster": ("cluster.disaggregated", "a prefill and a decode GPU, over HTTP, beside one GPU that does both"),
    "gpu-arrangements": ("cluster.arrangements", "agents' chats on GPUs: undivided, fixed roles, elastic"),
    "gpu-start": ("cluster.start", "from process start to the first token over HTTP, on one GPU"),
    "kernels-attention": ("kernels.attention", "attention kernels beside the chip's floor"),
    "kernels-experts": ("kernels.moe", "experts and their layer's launches beside the chip's floor"),
    "kernels-latent": ("kernels.latent", "latent attention beside the chip's floor"),
    "kernels-mamba1": ("kernels.mamba1", "Mamba1's scans and updates beside the chip's floor"),
    "kernels-products": ("kernels.dense:product_kernels", "dense products beside cuBLAS and the chip's floor"),
    "kernels-rows": ("kernels.dense:row_kernels", "norms, SwiGLU and sampling beside the chip's floor"),
    "kernels-scan": ("kernels.state:scan_kernels", "prefill scans beside what others publish"),
    "kernels-state": ("kernels.state:state_kernels", "state updates, convolutions, gather and scatter"),
    "kernels-tails": ("kernels.tails", "state updates over tails, which seldom write states"),
    "transfer-cpu": ("transfer.host", "a transfer between two processes beside a memcpy and TCP"),
    "transfer-gpu": ("transfer.gpu", "a transfer between two GPUs, its parts, and NIXL beside it"),
    "authentication": ("transfer.host:authentication", "microseconds that signing and verifying a message costs"),
}


def main() -> int:
    """Runs the benchmark that the first argument names; without one, lists them."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        for each, (_, subject) in BENCHMARKS.items():
            print(f"python -m benchmarks {each:<18} {subject}")
        return 0 if name in ("", "-h", "--help") else 2
    sys.argv[:2] = [f"python -m benchmarks {name}"]
    module, _, function = BENCHMARKS[name][0].partition(":")
    typer.run(getattr(import_module(f"benchmarks.{module}"), function or "main"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
