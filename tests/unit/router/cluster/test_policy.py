from headrace.request import Request, Sampling
from headrace.wire.messages import Role
from router.cluster.policy import RoundRobin
from tests.support.router.fake_nodes import node_info

REQUEST = Request("r", (1,), 1, Sampling(max_tokens=1, seed=0))
P0, P1, P2 = (node_info(f"p{i}", Role.PREFILL) for i in range(3))


def test_nodes_take_turns():
    policy = RoundRobin()
    picked = [policy.pick([P0, P1, P2], REQUEST).name for _ in range(4)]
    assert picked == ["p0", "p1", "p2", "p0"]


def test_turns_survive_nodes_that_come_and_go():
    policy = RoundRobin()
    assert policy.pick([P0, P1], REQUEST) == P0
    assert policy.pick([P0, P2], REQUEST) == P2
    assert policy.pick([P0, P1, P2], REQUEST) == P0
    assert policy.pick([P0], REQUEST) == P0
