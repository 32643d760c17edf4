"""Pages of the router in a real browser, Debian's chromium, where it is installed."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


async def shown(url: str, profile: Path, page_seconds: int = 3) -> tuple[str, str]:
    """The page after so many seconds of its own time, which stands still while it loads, and what its console said."""
    assert CHROMIUM is not None
    browser = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"),
        *(f"--user-data-dir={profile}", f"--virtual-time-budget={1000 * page_seconds}", "--dump-dom", url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        out, said = await browser.communicate()
    console = [line for line in said.decode(errors="replace").splitlines() if "CONSOLE" in line]
    return out.decode(), "\n".join(console)


def part(page: str, element: str) -> str:
    """What stands in the element with this id."""
    found = re.search(rf'id="{element}"[^>]*>(.*?)</(?:svg|tbody|span)>', page, re.S)
    assert found, element
    return found[1]
