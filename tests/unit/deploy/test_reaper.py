"""The process that ends a run after its supervisor."""

from deploy.processes import make_folders, run_folder
from deploy.reaper import start_reaper
from tests.support.deploy.run_processes import IGNORES_SIGTERM, OURS
from tests.support.patience import PATIENCE_S

RUN = f"{OURS}-reaped"


def test_a_closed_pipe_ends_the_run_and_its_folder(spawn) -> None:
    make_folders(RUN)
    reaper = start_reaper(RUN)
    stubborn = spawn(IGNORES_SIGTERM, RUN)
    assert reaper.poll() is None and stubborn.poll() is None
    assert reaper.stdin is not None
    reaper.stdin.close()
    assert reaper.wait(PATIENCE_S) == 0
    assert stubborn.wait(PATIENCE_S) == -9
    assert not run_folder(RUN).exists()
