"""Ports for a process that listens some seconds later."""

import socket

import pytest

from deploy import ports
from deploy.ports import free_ports

HOST = "127.0.0.1"


@pytest.fixture
def range_of_two(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The only ports there are to choose from."""
    first = min(free_ports(HOST)[0], ports.LAST - 1)
    monkeypatch.setattr(ports, "FIRST", first)
    monkeypatch.setattr(ports, "LAST", first + 1)
    return first, first + 1


def test_the_kernel_gives_them_nobody_and_no_two_are_alike(range_of_two: tuple[int, int]) -> None:
    first, second = range_of_two
    assert not {first, second} & set(ports._ephemeral_ports())
    for _ in range(20):
        assert sorted(free_ports(HOST, HOST)) == [first, second]


def test_a_taken_one_is_passed_over(range_of_two: tuple[int, int]) -> None:
    first, second = range_of_two
    with socket.create_server((HOST, first)):
        for _ in range(20):
            assert free_ports(HOST) == [second]


def test_where_the_kernel_gives_all_away_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_ephemeral_ports", lambda: range(1024, 65536))
    (port,) = free_ports(HOST)
    assert port > 0
    with socket.create_server((HOST, port)):
        pass
