"""What a cluster asks for, beside what Ray's hosts have."""

from deploy.resources import Demand, Host, impossible, inventory, waiting

A = Host("a", "10.0.0.1", {"CPU": 4, "GPU": 1, "memory": 1e9, "node:10.0.0.1": 1}, {"CPU": 0.5, "memory": 1e9})
B = Host("b", "10.0.0.2", {"CPU": 8}, {"CPU": 8})


def test_what_fits_beside_nothing_else_is_possible():
    assert impossible([Demand("p0", {"CPU": 8}), Demand("d0", {"CPU": 1, "GPU": 1})], [A, B]) == []
    assert impossible([Demand(f"d{i}", {"CPU": 0.1}) for i in range(120)], [A, B]) == []  # fractions add up to 12


def test_a_demand_that_no_host_can_hold_is_named():
    demands = [Demand("p0", {"CPU": 1, "GPU": 0.0}), Demand("d0", {"CPU": 8, "GPU": 1})]
    assert impossible(demands, [A, B]) == ["d0 asks for 8 CPU, 1 GPU: no host has that"]


def test_a_demand_that_its_only_host_cannot_hold_is_impossible():
    router = Demand("router", {"CPU": 5}, host_id="a")
    assert impossible([router], [A, B]) == ["router asks for 5 CPU: no host has that"]


def test_demands_that_fit_one_by_one_but_not_together_are_impossible():
    demands = [Demand("p0", {"GPU": 1}), Demand("d0", {"GPU": 1, "CPU": 1})]
    assert impossible(demands, [A, B]) == [
        "all nodes and routers together ask for 2 GPU, all hosts together have 1",
    ]


def test_demands_wait_where_others_hold_what_they_need():
    gpu, small = Demand("d0", {"GPU": 1}), Demand("p0", {"CPU": 2})
    assert waiting([gpu, small], [A, B]) == [gpu]
    assert waiting([small], [A]) == [small]


def test_the_inventory_shows_totals_and_each_host_without_rays_own_resources():
    assert list(inventory([B, A])) == [
        "Ray has, on 2 hosts: 12 CPU (8.5 free), 1 GPU (0 free)",
        "  10.0.0.1: 4 CPU (0.5 free), 1 GPU (0 free)",
        "  10.0.0.2: 8 CPU (8 free)",
    ]
