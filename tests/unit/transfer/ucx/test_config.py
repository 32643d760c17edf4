"""UCX's settings are one value, written before UCX is imported."""

import pytest

from headrace.config import ConfigError
from transfer.protocol.errors import TransportUnavailable
from transfer.ucx import UcxConfig


def test_the_measured_settings_are_the_defaults():
    environ = {"UCX_TLS": "all", "HOME": "/root"}
    UcxConfig(net_devices="eth0").apply(environ, loaded_modules={})
    assert environ == {
        "HOME": "/root",
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "eth0",
        "UCX_TCP_TX_SEG_SIZE": "256K",
        "UCX_TCP_RX_SEG_SIZE": "256K",
        "UCX_KEEPALIVE_INTERVAL": "1s",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "UCX_LOG_FILE": "stderr",
    }


def test_gpu_memory_brings_transports_that_must_be_there():
    config = UcxConfig(cuda=True)
    assert config.environment()["UCX_TLS"] == "tcp,cuda_copy,cuda_ipc"
    assert config.required_transports == ("cuda_copy", "cuda_ipc")
    assert UcxConfig().required_transports == ()


def test_settings_that_come_after_the_import_are_refused():
    environ = UcxConfig().environment()
    UcxConfig().apply(environ, loaded_modules={"ucxx": object()})
    with pytest.raises(TransportUnavailable, match=r"'UCX_TLS': 'tcp'"):
        UcxConfig(transports="posix,tcp").apply(environ, loaded_modules={"ucxx": object()})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"transports": ""}, "transports '': must not be empty"),
        ({"net_devices": ""}, "net_devices '': must not be empty"),
        ({"port": 65536}, "port 65536"),
        ({"silence_s": 0.2}, "silence_s 0.2"),
    ],
)
def test_a_bad_field_is_named(changes, said):
    with pytest.raises(ConfigError, match=said):
        UcxConfig(**changes)
