from decode_node.unsent import UnsentTokens


def test_an_answer_pauses_at_the_limit_and_goes_on_when_half_is_sent() -> None:
    unsent = UnsentTokens(4)
    assert [unsent.sampled(1) for _ in range(6)] == [False, False, False, True, False, False]
    assert [unsent.sent(num_tokens) for num_tokens in (1, 2, 1, 1)] == [False, False, True, False]


def test_a_reader_that_keeps_up_never_pauses_the_answer() -> None:
    unsent = UnsentTokens(4)
    for _ in range(100):
        assert not unsent.sampled(3)
        assert not unsent.sent(3)


def test_it_pauses_again() -> None:
    unsent = UnsentTokens(2)
    for _ in range(3):
        assert unsent.sampled(2)
        assert unsent.sent(2)
