"""The command line that the kernel benchmarks share. Times are those of `benchmarks.timing`: of a replayed graph."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated

import torch
import typer

from benchmarks.timing import HEADER, Row


def command(kinds: Mapping[str, Callable[[bool], Iterable[Row]]], subject: str) -> Callable[..., None]:
    """A command that prints the rows of `kinds`, each called with whether the library's rows are wanted, too."""

    @torch.no_grad()
    def main(
        only: Annotated[list[str], typer.Option(help=f"any of {', '.join(kinds)}")] = [*kinds],  # noqa: B006
        library: Annotated[bool, typer.Option("--library", help="what others publish, too")] = False,
    ) -> None:
        print(HEADER)
        for kind in only:
            for row in kinds[kind](library):
                print(row, flush=True)

    main.__doc__ = subject
    return main
