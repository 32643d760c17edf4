"""Attends to steps of many shapes on a GPU that is not there; prints each kernel that was compiled, as JSON.

A process of its own, as compiling_child.py.
"""

import json
import sys

import torch
from triton import knobs
from triton.runtime import driver

from kernels.paged_decode import PagedContexts, num_splits, paged_decode_triton
from kernels.paged_extend import paged_extend_triton
from kernels.paged_prefill import PagedChunks, paged_prefill_triton
from tests.support.compiling_child import Driver

H, KV, D, BLOCK = 4, 2, 16, 16
CPU = torch.device("cpu")
ENDS = [[1], [2], [16], [17, 40, 3], [4000], [4097, 5], [256] * 16, [30000]]


def main() -> None:
    compiled: list[str] = []
    driver.set_active(Driver())
    knobs.compilation.listener = lambda src, **compilation: compiled.append(src.fn.__name__)
    k_pool, v_pool = torch.empty(2, 1, BLOCK, KV, D, dtype=torch.bfloat16)
    splits = set()
    for ends in ENDS:
        ids = [range(-(-end // BLOCK)) for end in ends]
        contexts = PagedContexts.build(ends, ids, BLOCK, CPU)
        splits.add(num_splits(len(ends), KV, contexts.table_NM.shape[1] * BLOCK, 128))
        paged_decode_triton(torch.empty(len(ends), H, D, dtype=torch.bfloat16), k_pool, v_pool, 1.0, contexts)
        chunks = PagedChunks.build([1] * len(ends), [end - 1 for end in ends], ids, BLOCK, CPU)
        q = torch.empty(len(ends), H, D, dtype=torch.bfloat16)
        paged_prefill_triton(q, k_pool, v_pool, 1.0, chunks)
        paged_extend_triton(q, k_pool, v_pool, 1.0, chunks)
    json.dump({"compiled": compiled, "splits": sorted(splits)}, sys.stdout)


if __name__ == "__main__":
    main()
