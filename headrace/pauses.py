"""Pauses of a server's threads by Python itself: garbage collections, and waits for the interpreter's lock."""

from __future__ import annotations

import atexit
import gc
import sys

SWITCH_S = 5e-5
"""A thread that wants the interpreter's lock asks for it after so long; Python's default is 5 ms.

An engine's thread gives it up some thirty times a step, with each call of torch, and an event loop that is busy never
does so by itself. With 5 ms, beside a loop that receives blocks, steps of 9 ms took 15 (p95) and 33 (p99) on an H200.
"""

COLLECT_EVERY = (700, 10, 500)
"""`gc.set_threshold`: a collection of what is young for so many new objects, and every so many collections one of what
is older, of everything. Python's default is 10 and 10: on a decode node with prompts of 20,000 tokens a collection of
everything was a pause of 300 ms every 15 seconds.

The second number costs nothing in all, since a collection visits what has survived since the last of its kind, once:
with 100 instead of 10 (and as many collections of everything) a node that caches blocks paused for 5 to 17 ms every 270
prompts of 20,000 tokens, with 10 for 1 to 2 ms ten times as often; both took 70 to 90 ms for 1,000 prompts.
"""


def keep_pauses_short() -> None:
    """To be called once a server has started: what imports and loading have left is excluded from all later garbage
    collections, the long ones come seldom, and threads hand the interpreter's lock over quickly.

    A full collection stops every thread: after 160 prompts it takes 98 ms of processor time with the 200,000 objects of
    a node's start and 6 without. An H200 computes everything that was launched ahead in 75 ms.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or extension modules report the frozen objects as leaked
    gc.set_threshold(*COLLECT_EVERY)
    sys.setswitchinterval(SWITCH_S)
