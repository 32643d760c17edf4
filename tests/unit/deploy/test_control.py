"""Orders over a Unix socket: what the supervisor is told, and what the command is told."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from deploy import control
from deploy.control import ControlSocket, control_path, order
from deploy.errors import DeployError, NotRunning, RequestFailed
from tests.support.patience import PATIENCE_S


@pytest.fixture
def run_id(monkeypatch: pytest.MonkeyPatch, tmp_path) -> str:
    monkeypatch.setattr(control, "run_folder", lambda run_id: tmp_path)
    return "r"


@contextmanager
def supervisor(run_id: str, obey: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Iterator[None]:
    """Serves one order."""
    with ControlSocket(run_id) as socket:
        thread = threading.Thread(target=socket.serve, args=(obey, PATIENCE_S))
        thread.start()
        yield
        thread.join()


def test_an_order_is_obeyed_and_answered(run_id: str) -> None:
    with supervisor(run_id, lambda wanted: {"heard": wanted}):
        assert order(run_id, {"order": "scale"}, PATIENCE_S) == {"heard": {"order": "scale"}}
    assert not control_path(run_id).exists()


def test_an_order_that_fails_is_the_commands_error(run_id: str) -> None:
    def refuse(wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        raise DeployError("Ray has no room")

    with supervisor(run_id, refuse), pytest.raises(RequestFailed, match="Ray has no room"):
        order(run_id, {}, PATIENCE_S)


def test_a_defect_ends_the_order_and_not_the_supervisor(run_id: str) -> None:
    def fail(wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        raise AssertionError("a defect")

    with supervisor(run_id, fail), pytest.raises(RequestFailed, match="the supervisor failed: AssertionError"):
        order(run_id, {}, PATIENCE_S)


def test_a_supervisor_that_is_gone_is_not_waited_for(run_id: str) -> None:
    with pytest.raises(NotRunning, match="supervisor does not answer"):
        order(run_id, {}, PATIENCE_S)


def test_without_a_command_the_supervisor_goes_on(run_id: str) -> None:
    with ControlSocket(run_id) as socket:
        socket.serve(lambda wanted: pytest.fail("nobody asked"), 0.01)
