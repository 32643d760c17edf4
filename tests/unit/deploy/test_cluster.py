"""The supervisor's watch over the actors of a cluster."""

import logging
from types import SimpleNamespace

import pytest
from ray import exceptions

from deploy.cluster import Member, RunningCluster

UNFORESEEN = [
    exceptions.RuntimeEnvSetupError("no such package"),
    exceptions.ActorUnschedulableError("no host is left"),
    exceptions.NodeDiedError("the host is gone"),
    exceptions.OutOfMemoryError("the host ran out of memory"),
    exceptions.RaySystemError("connection lost"),
    exceptions.RpcError("unavailable"),
    exceptions.GetTimeoutError("no answer"),
    exceptions.RayActorError(),
]


class FakeMethod:
    def __init__(self, error):
        self._error = error

    def remote(self):
        raise self._error


def member(name, error):
    return Member(name, SimpleNamespace(info=FakeMethod(error)), pid=1)


@pytest.mark.parametrize("error", UNFORESEEN, ids=lambda error: type(error).__name__)
def test_an_actor_lost_in_any_way_is_logged_and_the_others_are_looked_at(error, caplog):
    cluster = RunningCluster([member("router", error)], [member("p0", error), member("d0", error)], ["http://here"])
    with caplog.at_level(logging.WARNING):
        cluster.look()
        cluster.look()
    lost = [record.getMessage().partition(" is lost")[0] for record in caplog.records]
    assert lost == ["router", "p0", "d0"]  # each once
