"""Lives of requests in the router, at the points where tests take them up."""

from headrace.request import FinishReason, Request, Sampling, Token
from headrace.token_array import TokenArray
from headrace.wire import messages as m
from router.requests.events import DecodeStarted, PrefillStarted
from router.requests.lifecycle import RequestLifecycle
from tests.support.router.fake_nodes import reservation

A, B, C = Token(7), Token(8), Token(9)
LANDED = m.TransferReport(8, 100, 200, 0.5)
DECODED = m.DecodeDone(
    FinishReason.LENGTH, m.DecodeReport("d0", 32, 0, "received", 0, (48,), drafted_tokens=9, accepted_tokens=6)
)
PREFILLED = m.PrefillDone(m.PrefillReport("p0", 32, 16, 16, 24, (32,)))


def life(token_gap_s: float | None = None, **sampling: int) -> RequestLifecycle:
    settings = Sampling(**({"max_tokens": 8, "seed": 1} | sampling))
    request = Request("r", TokenArray.of(range(40)), 40, settings)
    return RequestLifecycle(request, max_attempts=3, now_s=0.0, token_gap_s=token_gap_s)


def after(request: RequestLifecycle, *events: object) -> RequestLifecycle:
    for event in events:
        request.on(event, 1.0)  # type: ignore[arg-type]
    return request


def prefilling(token_gap_s: float | None = None, **sampling: int) -> RequestLifecycle:
    return after(life(token_gap_s, **sampling), DecodeStarted("d0"), reservation(1), PrefillStarted("p0", 1))


def moving(token_gap_s: float | None = None) -> RequestLifecycle:
    return after(prefilling(token_gap_s), m.FirstToken(A))


def decoding(token_gap_s: float | None = None) -> RequestLifecycle:
    return after(moving(token_gap_s), LANDED)
