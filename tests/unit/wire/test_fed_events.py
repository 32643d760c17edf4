"""A call's events come out in the order in which the node produced them, whichever stream was faster."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.request import Token
from headrace.wire.fed_events import FedEvents
from headrace.wire.messages import DecodeEvent, LocalPrefill, Tokens

PARTS = st.lists(st.one_of(st.integers(1, 3).map(lambda n: ["fed", n]), st.just(["event", 0])), max_size=12)


@given(PARTS, st.randoms(use_true_random=False))
def test_any_interleaving_of_both_streams_gives_the_same_sequence(parts: list, draw) -> None:
    expected: list[DecodeEvent | int] = []
    events, fed = [], []
    next_id = 0
    for kind, count in parts:
        if kind == "fed":
            ids = list(range(next_id, next_id + count))
            next_id += count
            fed.append((ids, len(events)))
            expected += ids
        else:
            event = LocalPrefill(len(events))
            events.append((event, next_id))
            expected.append(event)
    both = FedEvents()
    said: list[DecodeEvent | int] = []
    while events or fed:
        if events and (not fed or draw.random() < 0.5):
            both.add_event(*events.pop(0))
        else:
            both.add_fed(*fed.pop(0))
        while (event := both.next()) is not None and draw.random() < 0.9:
            said += flat(event)
        if event is not None:
            said += flat(event)
    while (event := both.next()) is not None:
        said += flat(event)
    assert said == expected
    assert not both.has_events


def flat(event: DecodeEvent) -> list[DecodeEvent | int]:
    """Tokens one by one: how many came together says nothing."""
    if isinstance(event, Tokens):
        assert all(token == Token(token.id) for token in event.tokens)
        return [token.id for token in event.tokens]
    return [event]


def test_tokens_that_have_gathered_come_as_one_event_up_to_the_next_of_the_stream() -> None:
    both = FedEvents()
    both.add_fed([1, 2], 0)
    both.add_fed([3], 0)
    both.add_fed([4], 1)
    both.add_event(LocalPrefill(7), 3)
    assert [both.next() for _ in range(4)] == [tokens(1, 2, 3), LocalPrefill(7), tokens(4), None]
    assert both.num_fed == 4


def tokens(*ids: int) -> Tokens:
    return Tokens(tuple(map(Token, ids)))
