"""The devices that UCX may use follow from the host's address."""

from pathlib import Path

import pytest

from transfer.ucx.devices import devices_for, interfaces, interfaces_owning, rdma_devices

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.2", "fe80::fc:ff:fe00:1%eth0"],
    "eth0:1": ["10.0.0.3"],
    "ib0": ["10.1.0.2"],
    "veth7f": ["172.17.0.1"],
    "down0": [],
}
RDMA = ["mlx5_0:1", "mlx5_1:1", "mlx5_1:2"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["127.0.0.1"], ["lo"]),
        (["127.0.1.1"], ["lo"]),
        (["::1"], ["lo"]),
        (["::1", "127.0.0.1"], ["lo"]),
        (["10.0.0.2"], ["eth0"]),
        (["10.0.0.3"], ["eth0"]),
        (["10.0.0.2", "10.0.0.3"], ["eth0"]),
        (["fe80::fc:ff:fe00:1%eth0"], ["eth0"]),
        (["10.0.0.2", "10.1.0.2"], ["eth0", "ib0"]),
        (["0.0.0.0"], []),
        (["10.9.9.9"], []),
        ([], []),
    ],
)
def test_the_interface_that_owns_the_address_is_found(wanted: list[str], found: list[str]):
    assert interfaces_owning(wanted, INTERFACES) == found


@pytest.mark.parametrize(
    ("host", "transports", "allowed"),
    [
        ("127.0.0.1", "tcp", "lo"),
        ("localhost", "tcp,cuda_copy,cuda_ipc", "lo"),
        ("10.0.0.2", "tcp", "eth0"),
        ("10.0.0.2", "tcp,posix,cma", "eth0"),
        ("10.1.0.2", "rc,cuda_copy", "ib0,mlx5_0:1,mlx5_1:1,mlx5_1:2"),
        ("10.1.0.2", "all", "ib0,mlx5_0:1,mlx5_1:1,mlx5_1:2"),
        ("0.0.0.0", "tcp", "all"),
        ("10.9.9.9", "rc", "all"),
        ("nowhere.invalid", "tcp", "all"),
    ],
)
def test_rdma_devices_are_allowed_beside_it_and_nothing_else_is(host: str, transports: str, allowed: str):
    assert devices_for(host, transports, INTERFACES, RDMA) == allowed


def test_every_port_of_an_rdma_device_is_one(tmp_path: Path):
    for port in ("mlx5_0/ports/1", "mlx5_1/ports/1", "mlx5_1/ports/2"):
        (tmp_path / port).mkdir(parents=True)
    assert rdma_devices(tmp_path) == RDMA
    assert rdma_devices(tmp_path / "nowhere") == []


def test_this_machines_loopback_interface_is_known():
    assert interfaces_owning(["127.0.0.1"], interfaces()) == ["lo"]


def test_the_devices_are_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    devices_for("127.0.0.1", "tcp", INTERFACES, RDMA)
    assert "UCX uses lo, for 127.0.0.1; see ucx.net_devices" in caplog.text
