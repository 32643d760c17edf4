"""The documentation names only files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [page for pattern in ("*.md", "docs/**/*.md", "tiny_models/*/README.md") for page in sorted(ROOT.glob(pattern))]
PATH = re.compile(r"[\w*.-]+(?:/[\w*.-]+)+\.(?:html|json|md|png|proto|py|toml|ya?ml)\b")  # * as in `*/actor.py`
LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    named = {*PATH.findall(text), *LINK.findall(text)}
    missing = [path for path in sorted(named) if not any(any(base.glob(path)) for base in (ROOT, page.parent))]
    assert missing == []
