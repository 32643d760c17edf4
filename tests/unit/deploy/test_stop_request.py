"""SIGINT and SIGTERM as a request to stop."""

import os
import signal
from collections.abc import Iterator

import pytest

from deploy.errors import StopRequested
from deploy.stop_request import StopRequest


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    """An installed request; the handlers of the test process come back afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    request = StopRequest()
    request.install()
    yield request
    for number, handler in before.items():
        signal.signal(number, handler)


def test_without_a_signal_work_continues(stop: StopRequest) -> None:
    assert not stop.is_set
    stop.check()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_an_interrupt(stop: StopRequest, number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    assert stop.is_set
    with pytest.raises(StopRequested, match="stopped by a signal"):
        stop.check()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
