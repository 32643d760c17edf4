"""Run folders and processes of these tests."""

import shutil
import subprocess
import sys

import pytest

from deploy.processes import working_folder
from deploy.runs import RunDirectory


@pytest.fixture
def runs(tmp_path):
    return RunDirectory(tmp_path / "runs")


@pytest.fixture
def spawn():
    processes, folders = [], []

    def start(code, run_id):
        folder = working_folder(run_id)
        folder.mkdir(parents=True, exist_ok=True)
        folders.append(folder.parent)
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=folder,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        processes.append(process)
        process.stdout.read(1)  # it runs
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
