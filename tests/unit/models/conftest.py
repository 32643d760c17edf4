import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copy_of(load_family, tmp_path: Path):
    """A private copy of a family's checkpoint folder, in a folder named `copy`."""

    def copied(family: str, copy: str = "copy") -> Path:
        return Path(shutil.copytree(load_family(family).path, tmp_path / copy))

    return copied
