import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.config import ConfigError
from headrace.tracing import TracingConfig
from router.__main__ import FLAGS, main
from router.config import RouterConfig
from router.routing.plan import Objectives
from tests.support.config.command_line import loaded
from tests.support.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_path": "/nowhere"}, "model_path /nowhere: no config.json there"),
        ({"port": 70000}, "port 70000: must lie in 0"),
        ({"max_concurrent": 0}, "max_concurrent 0: must be at least 1"),
        ({"max_queue": -1}, "max_queue -1: must be at least 0"),
        ({"request_timeout_s": 0}, "request_timeout_s 0: must be a finite number above 0"),
        ({"heartbeat_s": float("nan")}, "heartbeat_s nan: must be a finite"),
    ],
)
def test_a_bad_setting_is_named(model_folder: Path, fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        RouterConfig(**({"model_path": model_folder} | fields))


def test_the_model_is_served_under_its_folders_name(model_folder: Path):
    assert RouterConfig(model_folder).served_model_name == "little"
    assert RouterConfig(model_folder, served_model_name="other").served_model_name == "other"


def test_bad_files_and_flags_end_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "model_path is missing: give --model" in capsys.readouterr().err
    file = tmp_path / "router.yaml"
    file.write_text("model_pth: x")
    assert main(["--model-path", "/nowhere", "-c", str(file)]) == 2
    assert "model_pth is an unknown key: did you mean model_path?" in capsys.readouterr().err


def test_a_switch_is_turned_off_by_flag_and_by_file(model_folder: Path, tmp_path: Path):
    model = ["--model-path", str(model_folder)]
    assert loaded(RouterConfig, FLAGS, model).fetch_from_others
    assert not loaded(RouterConfig, FLAGS, [*model, "--no-fetch-from-others"]).fetch_from_others
    file = tmp_path / "router.yaml"
    file.write_text("fetch_from_others: false")
    assert not loaded(RouterConfig, FLAGS, [*model, "-c", str(file)]).fetch_from_others
    assert loaded(RouterConfig, FLAGS, [*model, "-c", str(file), "--fetch-from-others"]).fetch_from_others


def test_every_flag_can_be_set(model_folder: Path):
    values = {"--objectives-token-gap-s": "0.02", "--tracing-endpoint": "http://h:4318", "--tracing-sample": "0.5"}
    flags = [part for flag in values.items() for part in flag]
    config = loaded(RouterConfig, FLAGS, ["--model", str(model_folder), *flags])
    assert config == loaded(RouterConfig, FLAGS, ["--model-path", str(model_folder), *flags])
    assert config.objectives == Objectives(token_gap_s=0.02)
    assert config.tracing == TracingConfig("http://h:4318", 0.5)
    assert not {"--objectives", "--tracing", "--priorities"} & set(FLAGS), "no text can be one of these"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_serves_until_it_is_told_to_stop(model_folder: Path, tmp_path: Path, number: signal.Signals):
    file = tmp_path / "router.yaml"
    file.write_text(f"model_path: {model_folder}\nport: 0\nmax_queue: 3\n")
    command = [sys.executable, "-m", "router", "-c", str(file), "--control-port", "0", "--served-model-name", "tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[1]
            assert httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"][0]["id"] == "tiny"
            process.send_signal(number)
            assert process.wait(20) == 0
        finally:
            process.kill()
