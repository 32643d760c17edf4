"""GPUs of this host, without importing torch or Ray, which takes seconds."""

from __future__ import annotations

import os
import subprocess
from itertools import takewhile

TIMEOUT_S = 10.0
NO_GPU = {"", "-1", "none", "void", "nodevfiles"}
"""Entries of CUDA_VISIBLE_DEVICES behind which no GPU counts."""


def gpus_of_this_host() -> int:
    """How many NVIDIA GPUs a process may use here: those that the driver lists and CUDA_VISIBLE_DEVICES does not hide.

    0 as well if the driver's tool is missing, or fails.
    """
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    number = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return number
    return min(number, len(list(takewhile(lambda entry: entry.strip().lower() not in NO_GPU, visible.split(",")))))
