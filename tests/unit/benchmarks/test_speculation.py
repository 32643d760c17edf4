"""The pinned drafts of the speculation benchmark: as many are right as its table says."""

from benchmarks.engine.speculation import Pinned
from headrace.forward.sequence_input import SequenceInput
from headrace.request import Token


class Drawn:
    """Tokens of a launch, none of which is a draft."""

    def __init__(self, number: int) -> None:
        self._number = number

    def tokens(self) -> list[Token]:
        return [Token(1000 + i, None) for i in range(self._number)]


def test_so_many_drafts_of_each_sequence_are_right_and_the_next_is_not() -> None:
    drafted = SequenceInput([1, 2, 3, 4], 5, range(9), 0, 0, ((6, 1), (7, 2), (8, 3)), 4)
    plain, silent = SequenceInput([1], 5, range(9), 4, 4), SequenceInput([1, 2], 5, range(9), 5, 5, (), 0)
    right = iter((2, 0))
    inputs = [drafted, plain, silent, drafted]
    pinned = Pinned(Drawn(9), inputs, lambda most: next(right) if most else 0)  # type: ignore[arg-type]
    tokens = [token.id for token in pinned.tokens()]
    assert tokens == [2, 3, 4 ^ 1, 1003, 1004, 2 ^ 1, 1006, 1007, 1008]
