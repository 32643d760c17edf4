"""GPUs of this host, without importing torch or Ray, which takes seconds."""

from __future__ import annotations

import os
import subprocess

TIMEOUT_S = 10.0


def gpus_of_this_host() -> int:
    """How many NVIDIA GPUs a process may use here; 0 where there is no driver, or CUDA_VISIBLE_DEVICES hides them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() and each.strip() != "-1"])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
