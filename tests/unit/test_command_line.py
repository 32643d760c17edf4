"""Commands over config dataclasses."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.command_line import config_command, field_flags, run_command
from headrace.config import ConfigError, at_least, refuse
from headrace.wire.tls_config import TlsConfig
from tests.support.config.command_line import loaded


@dataclass(frozen=True)
class Engine:
    """An engine.

    device   where it
             runs
    threads  how many
    """

    device: str = "cpu"
    threads: int | None = None


@dataclass(frozen=True)
class Server:
    """A server.

    name   its name
    port   its port
    quiet  no log
    peers  its peers
    """

    name: str
    port: int = 80
    quiet: bool = False
    peers: tuple[str, ...] = ()
    engine: Engine = field(default_factory=Engine)
    tls: TlsConfig | None = None

    def __post_init__(self) -> None:
        refuse(at_least(self, 0, "port"))


FLAGS = {
    "--name": "name",
    "--port": "port",
    "--quiet": "quiet",
    "--peers": "peers",
    "--device": "engine.device",
    "--threads": "engine.threads",
    **field_flags(TlsConfig, "tls"),
}
TLS = ["--tls-ca", "a", "--tls-cert", "c", "--tls-key", "k"]


def of(*argv: str, **defaults: object) -> Server:
    return loaded(Server, FLAGS, list(argv), **defaults)


def status_and_error(capsys: pytest.CaptureFixture[str], *argv: str, run=lambda config: 0) -> tuple[int, str]:
    status = run_command(config_command("server", Server, FLAGS, run), argv, "server")
    return status, capsys.readouterr().err


def test_flags_override_the_file_and_the_file_overrides_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("name: filed\nport: 81\nengine: {threads: 2, device: gpu}\n")
    assert of(name="usual") == Server("usual")
    assert of("-c", str(file), name="usual") == Server("filed", 81, engine=Engine("gpu", 2))
    assert of("-c", str(file), "--port", "82", "--threads", "3").port == 82
    assert of("-c", str(file), "--threads", "3").engine == Engine("gpu", 3)


def test_a_section_that_is_empty_in_the_file_takes_flags(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("name: x\nengine:\n")
    assert of("-c", str(file)).engine == Engine()
    assert of("-c", str(file), "--threads", "3").engine == Engine(threads=3)


def test_a_switch_has_a_flag_for_each_way(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("quiet: yes")
    assert of("-c", str(file), "--name", "x").quiet
    assert not of("-c", str(file), "--name", "x", "--no-quiet").quiet
    assert of("--quiet", "--name", "x").quiet


def test_a_flag_of_a_list_comes_several_times_or_with_commas_and_replaces_the_files_list(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("name: x\npeers: [a]")
    assert of("-c", str(file)).peers == ("a",)
    assert of("-c", str(file), "--peers", "b", "--peers", "c").peers == ("b", "c")
    assert of("-c", str(file), "--peers", "b,c", "--peers", "d").peers == ("b", "c", "d")
    assert of("--name", "x").peers == ()


def test_certificates_on_the_command_line_replace_those_of_the_file_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("name: x\ntls: {ca: 1a, cert: 1c, key: 1k, server_name: n}")
    assert of("-c", str(file)).tls == TlsConfig("1a", "1c", "1k", "n")
    assert of("-c", str(file), *TLS).tls == TlsConfig("a", "c", "k")
    assert of("--name", "x", *TLS, "--tls-server-name", "m").tls == TlsConfig("a", "c", "k", "m")
    assert of("--name", "x").tls is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "server: command line: name is missing: give --name\n"),
        (["--name", "x", "--port", "abc"], "server: command line: port 'abc': must be a whole number\n"),
        (["--name", "x", "--port", "-1"], "server: command line: port -1: must be at least 0\n"),
        (["--name", "x", "--threads", "1.5"], "engine.threads '1.5': must be a whole number, or left out\n"),
        (["--name", "x", *TLS[:4]], "server: command line: tls.key is missing: give --tls-key\n"),
        (["--name", "x", "-c", "/none.yaml"], "server: /none.yaml: No such file"),
        (["--name", "x", "--prot", "1"], "--prot"),
    ],
)
def test_wrong_settings_are_one_message_and_status_2(argv, message, capsys: pytest.CaptureFixture[str]) -> None:
    status, error = status_and_error(capsys, *argv)
    assert status == 2
    assert message in error


def test_a_config_error_of_the_running_command_is_a_message_too(capsys: pytest.CaptureFixture[str]) -> None:
    def run(config: Server) -> int:
        raise ConfigError("port 80: taken, use another")

    assert status_and_error(capsys, "--name", "x", run=run) == (2, "server: port 80: taken, use another\n")


def test_the_status_is_that_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_and_error(capsys, "--name", "x", run=lambda config: 7) == (7, "")


def test_help_comes_from_the_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(config_command("server", Server, FLAGS, lambda config: 0), ["--help"], "server") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--device TEXT where it runs (default cpu)" in text
    assert "--quiet / --no-quiet no log (default false)" in text
    assert "--port INTEGER its port (default 80)" in text
    assert "--peers TEXT its peers; also several times --" in text
