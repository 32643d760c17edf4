"""Checkpoints that every test of a session may share: random tiny models, made once. The order of all tests."""

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from xdist.remote import Producer

if not torch.cuda.is_available():
    # Before the first Triton kernel is imported: here they run in the interpreter, or not at all.
    os.environ["TRITON_INTERPRET"] = "1"

from headrace.speculation.config import DRAFTERS
from tests.support.engine.tiny_checkpoints import make_checkpoint
from tests.support.kernels.interpreter import hasten_the_interpreter
from tests.support.schedule import UNDISTURBED, FilesThenUndisturbed

if "TRITON_INTERPRET" in os.environ:
    hasten_the_interpreter()

torch.set_num_threads(1)  # several processes share the machine's two cores

LOG_END = 3000  # characters

settings.load_profile("ci")  # the same examples in each run, none of them timed; --hypothesis-profile=default searches


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_checkpoint("granite")` is the folder of a random model of that family."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def checkpoint(family: str) -> Path:
        path = folder / family
        return path if path.exists() else make_checkpoint(path, family)

    return checkpoint


def pytest_addoption(parser: pytest.Parser) -> None:
    campaigns = parser.getgroup("campaigns", "how long the long ones are")
    campaigns.addoption("--fault-rounds", type=int, default=1, help="faults of each kind, with each model")
    campaigns.addoption("--fault-drafter", choices=DRAFTERS, default="none", help="of the nodes that meet faults")
    campaigns.addoption("--grammar-rounds", type=int, default=3, help="decode nodes killed in the middle of JSON")
    campaigns.addoption("--hostile-seconds", type=float, default=15, help="of hostile clients beside ordinary chats")
    campaigns.addoption("--recall-questions", type=int, default=64, help="of each shipped model, through a cluster")
    campaigns.addoption("--soak-requests", type=int, default=300, help="requests in a row")
    campaigns.addoption("--abort-storms", type=int, default=1, help="of 300 aborted requests")
    campaigns.addoption("--soak-sessions", type=int, default=1000, help="sessions in a row")
    campaigns.addoption("--soak-devices", nargs=2, default=("cpu", "cpu"), help="of the sender and of the receiver")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test's report has the ends of the logs that its processes have left in `tmp_path`."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and folder is not None:
        for log in sorted(folder.glob("*.log")):
            report.sections.append((f"end of {log.name}", log.read_text(errors="replace")[-LOG_END:]))
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.nodeid.partition("::")[0] in UNDISTURBED)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesThenUndisturbed:
    config.option.loadscopereorder = False
    return FilesThenUndisturbed(config, log)
