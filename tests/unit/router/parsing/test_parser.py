"""Which bodies are parsed on the event loop, and which in a process of their own."""

from typing import Any, cast

import pytest

from router.parsing.body_parser import BodyParser, ParseJob, ServedModel
from router.parsing.parser import SMALL_BODY_BYTES, SMALL_BODY_OBJECTS, RequestParser
from router.parsing.pool import WorkerPool


class Here(BodyParser):
    """Parses nothing, but says that it was asked to."""

    def __init__(self) -> None:
        pass

    def parse(self, job: ParseJob[Any]) -> Any:
        return "here"


def read(data: bytes, model: ServedModel) -> str:
    raise AssertionError("not read in this test")


@pytest.mark.parametrize(
    ("data", "before", "where"),
    [
        (b"{}", (), "here"),
        (b"x" * SMALL_BODY_BYTES, (), "here"),
        (b"x" * (SMALL_BODY_BYTES + 1), (), None),
        (b"{" * (SMALL_BODY_OBJECTS + 1), (), None),
        (b"{}", (b"{}", b"x" * 100), "here"),
        (b"{}", (b"x" * SMALL_BODY_BYTES,), None),
        (b"{}", (b"{}",) * SMALL_BODY_OBJECTS, None),
    ],
)
def test_a_small_body_that_continues_a_long_chat_is_not_parsed_on_the_loop(
    data: bytes, before: tuple[bytes, ...], where: str | None
) -> None:
    parser = RequestParser(Here(), cast(WorkerPool, None), lambda: None, 1.0)
    assert parser.parse_at_once(read, data, before) == where
