"""A node's spans: one for each call of a router, with a stage from each message to the next of another kind."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TypeVar

from headrace.tracing import Outcome, Stage, TraceContext, TracedWork, Tracing

T = TypeVar("T")


async def traced(
    tracing: Tracing,
    name: str,
    parent: TraceContext,
    replies: AsyncGenerator[T],
    first_stage: str,
    begins: Mapping[type, str],
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[T, None]:
    """The replies of a call, and a span of it, once it is over, with its stages.

    first_stage  what goes on before the first reply that begins another one
    begins       by the type of a reply, the stage that begins with it
    """
    began_s = clock()
    work = tracing.begin(name, parent, began_s)
    marks = [(first_stage, began_s)]
    error = "ended early"
    try:
        async with aclosing(replies):
            async for reply in replies:
                stage = begins.get(type(reply))
                if work.is_recorded and stage is not None and stage != marks[-1][0]:
                    marks.append((stage, clock()))
                yield reply
        error = ""
    except Exception as cause:
        error = type(cause).__name__
        raise
    finally:
        _end(work, marks, clock(), error)


def _end(work: TracedWork, marks: list[tuple[str, float]], end_s: float, error: str) -> None:
    ends = [start_s for _, start_s in marks[1:]] + [end_s]
    stages = [Stage(name, start_s, stop_s) for (name, start_s), stop_s in zip(marks, ends, strict=True)]
    work.end(Outcome(end_s, stages, error=error))
