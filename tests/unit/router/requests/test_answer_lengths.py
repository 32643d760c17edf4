from router.requests.answer_lengths import AnswerLengths


def test_answers_are_expected_to_be_as_long_as_recent_ones():
    lengths = AnswerLengths()
    assert lengths.expected(100_000) == 256
    for _ in range(300):
        lengths.ended(40)
    assert lengths.expected(100_000) in range(40, 48)
    assert lengths.expected(8) == 8
    assert lengths.expected(100_000, num_tokens=30) in range(10, 18)
    assert lengths.expected(100_000, num_tokens=90) == 1
