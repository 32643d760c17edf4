"""Work in threads: a piece that takes too long costs the others nothing but a little time."""

import time
import weakref

import numpy as np

from headrace.grammar_threads import GrammarThreads
from tests.support.patience import PATIENCE_S


class Work:
    """Returns its number, after so many seconds of processor time; or when `is_over`."""

    def __init__(self, number: int, spins_s: float = 0.0) -> None:
        self.number, self.spins_s = number, spins_s
        self.is_over = False
        self.num_begun = 0

    def __call__(self) -> int:
        self.num_begun += 1
        began_s = time.thread_time()
        while time.thread_time() - began_s < self.spins_s and not self.is_over:
            pass
        return self.number


def done(threads: GrammarThreads, works: list[Work]) -> list[int | None]:
    return [None if each is None else each[0] for each in threads.run(works, range(len(works)))]


def wait_for_none_left_behind(threads: GrammarThreads) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while threads.num_left_behind:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_each_piece_has_its_own_result():
    for most in (1, 3):
        threads = GrammarThreads(most, limit_s=60)
        for count in (0, 1, 4, 5, 30):
            assert done(threads, [Work(n) for n in range(count)]) == list(range(count))
        assert threads.num_left_behind == 0


def test_what_takes_too_long_is_given_up_and_the_others_are_not():
    for most in (1, 2):
        threads = GrammarThreads(most, limit_s=0.1)
        works = [Work(n) for n in range(10)]
        endless = Work(99, spins_s=PATIENCE_S)
        works[4] = endless
        assert done(threads, works) == [0, 1, 2, 3, None, 5, 6, 7, 8, 9]
        assert threads.num_left_behind == 1
        assert done(threads, [Work(n) for n in range(10)]) == list(range(10))
        assert [each.num_begun for each in works] == [1] * 10
        endless.is_over = True
        wait_for_none_left_behind(threads)


def test_of_a_grammar_that_takes_too_long_few_pieces_are_begun():
    threads = GrammarThreads(2, limit_s=0.1)
    endless = [Work(99, spins_s=PATIENCE_S) for _ in range(12)]
    results = threads.run([*endless, Work(7)], ["slow"] * 12 + ["quick"])
    assert results[:12] == [None] * 12 and results[12] is not None
    assert sum(each.num_begun for each in endless) == threads.num_left_behind <= 2
    for each in endless:
        each.is_over = True


def test_what_raises_is_given_up_and_the_others_are_not():
    class Panic(BaseException):
        pass

    class Broken(Work):
        def __call__(self) -> int:
            raise Panic

    threads = GrammarThreads(1, limit_s=60)
    for _ in range(2):
        assert done(threads, [Work(1), Broken(2), Work(3)]) == [1, None, 3]
    assert threads.num_left_behind == 0


def test_time_in_which_others_have_the_processor_does_not_count():
    class Sleeper(Work):
        def __call__(self) -> int:
            time.sleep(0.3)
            return super().__call__()

    ((value, seconds),) = filter(None, GrammarThreads(1, limit_s=0.1).run([Sleeper(7)], ["a"]))
    assert value == 7 and seconds < 0.1


def test_the_seconds_of_a_piece_are_its_own():
    works = [Work(0), Work(1, spins_s=0.05), Work(2), Work(3, spins_s=0.02)]
    seconds = [each[1] for each in filter(None, GrammarThreads(1, limit_s=60).run(works, "abcd"))]
    assert seconds[1] >= 0.05 and 0.02 <= seconds[3] < 0.05
    assert max(seconds[0], seconds[2]) < 0.02


def test_memory_is_kept_while_a_thread_that_was_left_behind_may_write_to_it():
    threads = GrammarThreads(1, limit_s=0.05)
    endless, memory = Work(99, spins_s=PATIENCE_S), np.zeros(3)
    is_kept = weakref.ref(memory)
    threads.run([endless], ["slow"], memory)
    del memory
    assert is_kept() is not None
    endless.is_over = True
    wait_for_none_left_behind(threads)
    deadline_s = time.monotonic() + PATIENCE_S
    while is_kept() is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_an_idle_thread_keeps_no_memory():
    memory = np.zeros(3)
    is_kept = weakref.ref(memory)
    threads = GrammarThreads(1, limit_s=60)
    threads.run([Work(1)], ["a"], memory)
    del memory
    deadline_s = time.monotonic() + PATIENCE_S
    while is_kept() is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
