"""The command line that benchmarks of several kinds of kernel share."""

import argparse
from collections.abc import Callable, Iterable, Mapping

from benchmarks.gpu_timing import HEADER, Row
from tests.support.kernels.compiled import Launch, compile_for_h200


def main(
    text: str | None,
    kinds: Mapping[str, Callable[[bool], Iterable[Row]]],
    compile_checks: Callable[[], Iterable[tuple[str, Launch]]] | None = None,
) -> None:
    """Prints the rows of the kinds asked for, with or without variants; or what compiling takes, which needs no GPU."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", action="store_true", help="other tiles and the library, too")
    if compile_checks is not None:
        parser.add_argument("--compile-only", action="store_true", help="registers and shared memory; needs no GPU")
    parser.add_argument("--only", nargs="+", choices=kinds, default=tuple(kinds))
    arguments = parser.parse_args()
    if compile_checks is not None and arguments.compile_only:
        checks = list(compile_checks())
        reports = compile_for_h200([launch for _, launch in checks])
        for (name, _), report in zip(checks, reports, strict=True):
            print(name, report)
        return
    print(HEADER)
    for kind in arguments.only:
        for row in kinds[kind](arguments.variants):
            print(row, flush=True)
