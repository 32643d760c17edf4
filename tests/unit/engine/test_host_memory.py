import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]

# In a process of its own: the setting is the whole process's.
PROGRAM = """
import ctypes, resource, threading, torch
from headrace.engine.host_memory import keep_freed_memory
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a fault is a page of 4 KiB, whatever the machine's setting
{setting}

def temporary(mebibytes):
    torch.zeros(mebibytes << 20, dtype=torch.uint8)

def step():
    temporary(31)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    temporary(24)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

engine_thread = threading.Thread(target=step)
engine_thread.start()
engine_thread.join()
"""
KEEPING = "assert keep_freed_memory()"
PAGES = 24 * 256
FEW = PAGES / 100  # at either end of a temporary lie pages that its neighbours in the heap have touched


def page_faults(setting: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setting=setting)],
        cwd=ROOT,
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own settings")
def test_a_temporary_takes_the_memory_that_an_earlier_one_freed() -> None:
    assert page_faults("") > PAGES - FEW, "this allocator keeps what is freed anyway: the test shows nothing"
    assert page_faults(KEEPING) < FEW


SIZES = """
import psutil, torch
from headrace.engine.host_memory import NUM_PROGRAMS, keep_few_programs
from headrace.kernels.dense.linear import LinearWeight
torch.set_num_threads(1)
{setting}
weight = LinearWeight(torch.ones(128, 128))

def multiply(sizes):
    for rows in sizes:
        weight(torch.ones(rows, 128))
    return psutil.Process().memory_info().rss >> 20

before = multiply(range(1, NUM_PROGRAMS))
print(multiply(range(NUM_PROGRAMS, 4 * NUM_PROGRAMS)) - before)
"""


def growth_mib(setting: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SIZES.format(setting=setting)],
        cwd=ROOT,
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return int(done.stdout)


def test_products_of_ever_other_sizes_take_no_more_memory() -> None:
    assert 4 * growth_mib("keep_few_programs()") < growth_mib("")  # 36 and 254 MiB
