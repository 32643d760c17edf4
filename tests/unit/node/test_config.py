"""A node's config from a file and a command line."""

from pathlib import Path

import pytest

from node.__main__ import main
from node.config import NODE_FLAGS, NodeConfig
from tests.support.config.command_line import loaded


def test_without_a_file_the_defaults_are_those_of_the_config() -> None:
    config = loaded(NodeConfig, NODE_FLAGS, ["--model", "m"], name="p0")
    assert config == NodeConfig(name="p0", model_path="m")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(
        "model_path: m\nname: d7\nengine: {device: 'cuda:1', load_format: dummy, max_running: 8}\n"
        "local_prefill: {max_tokens: 0}\nucx: {transports: 'tcp,cuda_copy'}\n"
    )
    flags = ["-c", str(file), "--name", "d8", "--device", "cpu", "--port", "9"]
    config = loaded(NodeConfig, NODE_FLAGS, flags, name="d0")
    assert (config.name, config.model_path, config.port) == ("d8", "m", 9)
    assert (config.engine.device, config.engine.load_format, config.engine.max_running) == ("cpu", "dummy", 8)
    assert (config.local_prefill.max_tokens, config.ucx.transports) == (0, "tcp,cuda_copy")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("engine: {load_fromat: dummy}", "engine.load_fromat is an unknown key: did you mean load_format?"),
        ("engine: {max_running: many}", "engine.max_running"),
        ("engine: dummy", "engine 'dummy': must be a mapping"),
        ("- 1", "[1] must be a mapping"),
        ("a: [", "not YAML"),
        ("ucx: {port: 70000}", "70000"),
    ],
)
def test_a_faulty_file_is_named_with_its_fault(
    text: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(text)
    assert main(["--model", "m", "--threads", "1", "-c", str(file)]) == 2
    assert fault in capsys.readouterr().err


def test_no_model_at_all_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == "node: command line: model_path is missing: give --model\n"


def test_the_help_names_the_roles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "prefill, decode, or both" in " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_node_starts_in_the_role_that_it_is_given(role: str) -> None:
    assert loaded(NodeConfig, NODE_FLAGS, ["--model", "m", "--role", role], name="n0").role == role


def test_an_unknown_role_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "m", "--role", "decoder"]) == 2
    assert "role 'decoder': must be one of prefill, decode, both" in capsys.readouterr().err


def test_a_node_has_the_settings_of_both_roles(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text("model_path: m\nfetch_from_others: {min_tokens: 32}\nreservation_timeout_s: 5\n")
    config = loaded(NodeConfig, NODE_FLAGS, ["-c", str(file)], name="n0")
    assert (config.fetch_from_others.min_tokens, config.reservation_timeout_s) == (32, 5)


@pytest.mark.parametrize("change", [{"name": ""}, {"port": 70000}, {"staging_buffers": 0}, {"shutdown_grace_s": -1}])
def test_a_bad_setting_is_named(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        NodeConfig(**{"name": "p0", "model_path": "m"} | change)
