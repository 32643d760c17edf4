"""Plans and contents for transfer tests: small, and each message different from all others."""

import numpy as np

from transfer.buffers import Buffer
from transfer.protocol.authentication import SECRET_BYTES
from transfer.protocol.plan import PlannedMessage, TransferPlan


def small_plan(nonce: int = 7, **changes: int) -> TransferPlan:
    """5 blocks of 4 tokens (18 tokens: the last is partial), 3 missing, 2 a message; then the state."""
    fields = {
        "nonce": nonce,
        "num_tokens": 18,
        "first_block": 2,
        "block_size": 4,
        "block_bytes": 100,
        "state_bytes": 300,
        "max_message_bytes": 250,
    }
    return TransferPlan(**{**fields, **changes})


def secret_of(nonce: int) -> bytes:
    """Each session's own, known to both ends of a test."""
    return nonce.to_bytes(SECRET_BYTES)


def contents(message: PlannedMessage, nonce: int) -> Buffer:
    """What a message of this session must carry, byte for byte: reproducible and unlike any other's."""
    return np.random.default_rng([nonce, message.index]).integers(0, 256, message.num_bytes, np.uint8)
