"""One decode node as a process: `python -m decode_node --model DIR --router HOST:PORT`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from decode_node.config import DecodeNodeConfig
from decode_node.service import decode_node
from node_runtime import process


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until it is told to stop; the process's exit status."""
    return process.main(argv, DecodeNodeConfig, decode_node, "d0")


if __name__ == "__main__":
    sys.exit(main())
