"""Other numbers of nodes for a running cluster: which are started, and which are drained."""

import pytest

from deploy.config import ClusterConfig, cluster_config
from deploy.demo import MODEL
from deploy.errors import DeployError
from deploy.operations import counts_of
from deploy.scaling import scaling
from headrace.config import ConfigError

RUNNING = ("p0", "d0", "d2", "n0")


@pytest.fixture
def config() -> ClusterConfig:
    counts = {"prefill": {"count": 1}, "decode": {"count": 2}, "both": {"count": 1}}
    data = {"model": str(MODEL), "router": {"roles": "fixed"}, **counts}
    return cluster_config(data, source="test", base=MODEL.parent)


def names(added) -> list[str]:
    return [f"{group.node.name}{number}" for group, number in added]


def test_new_nodes_take_the_lowest_free_numbers(config: ClusterConfig) -> None:
    plan = scaling(config, RUNNING, {"prefill": 3, "decode": 4})
    assert (names(plan.added), plan.removed) == (["p1", "p2", "d1", "d3"], ())
    assert (plan.config.prefill.count, plan.config.decode.count, plan.config.both.count) == (3, 4, 1)


def test_the_newest_nodes_are_drained_first(config: ClusterConfig) -> None:
    plan = scaling(config, RUNNING, {"decode": 0, "both": 2})
    assert (names(plan.added), plan.removed) == (["n1"], ("d2", "d0"))


def test_equal_numbers_change_nothing(config: ClusterConfig) -> None:
    plan = scaling(config, RUNNING, {"prefill": 1, "decode": 2})
    assert (plan.added, plan.removed) == ((), ())


def test_numbers_that_make_no_cluster_are_refused(config: ClusterConfig) -> None:
    with pytest.raises(ConfigError, match="no node would decode"):
        scaling(config, RUNNING, {"decode": 0, "both": 0})
    with pytest.raises(ConfigError, match="count -1"):
        scaling(config, RUNNING, {"decode": -1})
    with pytest.raises(DeployError, match="no group 'router': there are prefill, decode, both"):
        scaling(config, RUNNING, {"router": 2})


def test_only_given_numbers_count() -> None:
    assert counts_of(None, 3, None) == {"decode": 3}
    with pytest.raises(DeployError, match="give a number of nodes: --prefill, --decode or --both"):
        counts_of(None, None, None)
