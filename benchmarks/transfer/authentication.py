"""The cost of authenticating a transfer's messages, in microseconds a message of any size, and of the alternative.

    python -m benchmarks authentication [--rounds 20000]

The MAC covers an envelope and the digest in it, not the payload again. The last rows time a keyed hash of the payload
itself, beside the digest that the host makes anyway.
"""

import numpy as np
from blake3 import blake3

from benchmarks.timing import best_s
from transfer.protocol.authentication import Verifier, new_secret, sign
from transfer.protocol.digest import page_hashes
from transfer.protocol.envelope import Envelope, new_nonce
from transfer.protocol.errors import Unauthenticated
from transfer.protocol.plan import TransferPlan

PAYLOAD_BYTES = 64 << 20
REPEATS = 5


def main(rounds: int = 20_000) -> None:
    """Microseconds that authenticating a message costs."""
    plan = TransferPlan(new_nonce(), 8192, 0, 16, 65536, PAYLOAD_BYTES, PAYLOAD_BYTES)
    secret = new_secret()
    header = Envelope.of(plan.nonce, 5, plan.messages[0]).fields() + bytes(16)
    data, forged = sign(header, secret), sign(header, new_secret())
    verifier = Verifier(secret)

    def refuse() -> None:
        try:
            verifier.verify_envelope(forged)
        except Unauthenticated:
            return
        raise AssertionError("a forged envelope was admitted")

    decode_s = best_s(lambda: Envelope.decode(header), REPEATS, rounds)
    print(f"{'microseconds a message':<40}")
    print(f"{'sign (sender)':<40}{best_s(lambda: sign(header, secret), REPEATS, rounds) * 1e6:>10.2f}")
    admit_s = best_s(lambda: verifier.verify_envelope(data), REPEATS, rounds)
    print(f"{'verify and decode (receiver)':<40}{admit_s * 1e6:>10.2f}")
    print(f"{'  of these, decode':<40}{decode_s * 1e6:>10.2f}")
    print(f"{'refuse a forged one':<40}{best_s(refuse, REPEATS, rounds) * 1e6:>10.2f}")
    payload = np.random.default_rng(0).integers(0, 256, PAYLOAD_BYTES, np.uint8)
    print(f"{PAYLOAD_BYTES >> 20} MiB on one core, ms")
    for name, work in (
        ("digest of the payload", lambda: page_hashes(payload)),
        ("keyed hash of the payload", lambda: blake3(payload.data, key=secret).digest()),
    ):
        print(f"{name:<40}{best_s(work, REPEATS) * 1e3:>10.1f}")
