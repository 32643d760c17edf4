"""Checks the first line of every docstring: it names its subject, so that it stands alone.

    python .ci/check_docstrings.py [FOLDER ...]

A first line that opens with a relative word ("What ...", "Of ...", "Until ...") cannot be understood without the code
that it should explain. Tests are exempt: their names are sentences. Prints file, line and text of each offender.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OPENINGS = frozenset(
    {"What", "Of", "That", "Those", "Until", "Who", "Whom", "Whose", "It", "Its", "They", "Them", "Where", "Whether"}
)
EXEMPT = ("tests/", "headrace/wire/generated/")


def offenders(file: Path) -> Iterator[tuple[int, str]]:
    """Line and first line of each offending docstring; strings under constants count as docstrings."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first_line = node.value.value.strip().partition("\n")[0]
            opening = first_line.partition(" ")[0].strip(".,:;!?'`").partition("'")[0]
            if opening in OPENINGS:
                yield node.lineno, first_line


def main(folders: list[str]) -> int:
    """Exit status 1 if any docstring of the tracked files below `folders` offends."""
    tracked = subprocess.run(["git", "ls-files", "--", *folders], capture_output=True, text=True, check=True).stdout
    files = [f for f in tracked.split() if f.endswith(".py") and not f.startswith(EXEMPT)]
    found = [(file, line, text) for file in files for line, text in offenders(Path(file))]
    for file, line, text in found:
        print(f"{file}:{line}: {text}")
    if found:
        print(f"{len(found)} docstrings do not name their subject first: see CONTRIBUTING.md", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
