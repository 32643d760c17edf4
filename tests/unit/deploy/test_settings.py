"""The file of all settings: it is one that a cluster can be started from, and it explains each of them."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.config import Overrides, cluster_config, cluster_from_options
from deploy.settings import MODEL, settings_file


@pytest.mark.parametrize("removes_marks", [False, True])
def test_a_cluster_of_that_file_is_one_without_any_settings(removes_marks: bool) -> None:
    text = re.sub(r"(?m)^( *)#(\w)", r"\1\2", settings_file()) if removes_marks else settings_file()
    data = yaml.safe_load(text)
    assert ("policy" in data["router"]) == removes_marks
    config = cluster_config(data | {"model": str(MODEL)}, source="all", base=Path.cwd())
    assert config == cluster_from_options(None, Overrides(model=MODEL))


def test_each_setting_is_there_and_has_its_meaning_above_it() -> None:
    lines = settings_file().splitlines()
    named = {line.strip(" #").partition(":")[0]: i for i, line in enumerate(lines) if not line.strip().startswith("# ")}
    config = cluster_from_options(None, Overrides(model=MODEL))
    parts: list[Any] = [config, config.router, config.prefill, config.prefill.node, config.prefill.node.engine]
    names = {field.name for part in parts for field in dataclasses.fields(part)}
    assert names - named.keys() == {"model_path", "router_addresses", "role"}, "they are set at start"
    for name in ("policy", "max_running", "state_dtype", "num_gpus", "start_timeout_s", "reservation_timeout_s"):
        assert lines[named[name] - 1].strip().startswith("# "), name
    assert "  # chooses the nodes of each request" in lines[named["policy"] - 2]
    assert "#   cert  " in settings_file(), "those of a section that is left out"
