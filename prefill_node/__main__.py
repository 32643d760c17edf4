"""One prefill node as a process: `python -m prefill_node --model DIR --router HOST:PORT`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from node_runtime import process
from prefill_node.config import PrefillNodeConfig
from prefill_node.service import prefill_node


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until it is told to stop; the process's exit status."""
    return process.main(argv, PrefillNodeConfig, prefill_node, "p0")


if __name__ == "__main__":
    sys.exit(main())
