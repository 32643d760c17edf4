"""Work in threads: a group that takes too long costs the others nothing but a little time."""

import time
import weakref
from threading import get_ident

import numpy as np

from headrace.grammar_threads import GrammarThreads, WorkGroup
from tests.support.patience import PATIENCE_S


class Work:
    """A piece of work that takes so many seconds of processor time, or until `is_over`.

    threads   those in which it was begun
    """

    def __init__(self, spins_s: float = 0.0) -> None:
        self.spins_s = spins_s
        self.is_over = False
        self.num_done = 0
        self.threads: list[int] = []

    def __call__(self) -> None:
        self.threads.append(get_ident())
        began_s = time.thread_time()
        while time.thread_time() - began_s < self.spins_s and not self.is_over:
            pass
        self.num_done += 1


def each_alone(works: list[Work]) -> list[WorkGroup]:
    return [WorkGroup(number, [work]) for number, work in enumerate(works)]


def are_done(threads: GrammarThreads, groups: list[WorkGroup]) -> list[bool]:
    return [seconds is not None for seconds in threads.run(groups)]


def wait_for_none_left_behind(threads: GrammarThreads) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while threads.num_left_behind:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_each_piece_is_done_once():
    for most in (1, 3):
        threads = GrammarThreads(most, limit_s=60)
        for count in (0, 1, 4, 5, 30):
            works = [Work() for _ in range(count)]
            assert are_done(threads, each_alone(works)) == [True] * count
            assert [each.num_done for each in works] == [1] * count
        assert threads.num_left_behind == 0


def test_a_group_is_done_in_order_by_one_thread():
    threads, done = GrammarThreads(3, limit_s=60), []

    class Noted(Work):
        def __call__(self) -> None:
            super().__call__()
            done.append(self)

    groups = [WorkGroup("a", [Noted(spins_s=0.002) for _ in range(5)]) for _ in range(4)]
    assert are_done(threads, groups) == [True] * 4
    for group in groups:
        assert len({ident for each in group.pieces for ident in each.threads}) == 1
        assert [each for each in done if each in group.pieces] == group.pieces


def test_what_takes_too_long_is_given_up_and_the_others_are_not():
    for most in (1, 2):
        threads = GrammarThreads(most, limit_s=0.1)
        works = [Work() for _ in range(10)]
        endless = works[4] = Work(spins_s=PATIENCE_S)
        assert are_done(threads, each_alone(works)) == [each is not endless for each in works]
        assert threads.num_left_behind == 1
        assert are_done(threads, each_alone([Work() for _ in range(10)])) == [True] * 10
        assert [len(each.threads) for each in works] == [1] * 10
        endless.is_over = True
        wait_for_none_left_behind(threads)


def test_with_a_piece_that_takes_too_long_its_group_ends():
    threads = GrammarThreads(2, limit_s=0.1)
    before, endless, after = Work(), Work(spins_s=PATIENCE_S), Work()
    assert are_done(threads, [WorkGroup("a", [before, endless, after]), *each_alone([Work()])]) == [False, True]
    endless.is_over = True
    wait_for_none_left_behind(threads)
    assert [each.num_done for each in (before, endless, after)] == [1, 1, 0]


def test_the_limit_is_for_a_piece_and_not_for_its_group():
    threads = GrammarThreads(1, limit_s=0.2)
    assert are_done(threads, [WorkGroup("a", [Work(spins_s=0.1) for _ in range(5)])]) == [True]


def test_of_a_grammar_that_takes_too_long_few_groups_are_begun():
    threads = GrammarThreads(2, limit_s=0.1)
    endless, quick = [Work(spins_s=PATIENCE_S) for _ in range(12)], Work()
    groups = [*(WorkGroup("slow", [each]) for each in endless), WorkGroup("quick", [quick])]
    assert are_done(threads, groups) == [False] * 12 + [True]
    assert sum(len(each.threads) for each in endless) == threads.num_left_behind <= 2
    for each in endless:
        each.is_over = True


def test_what_raises_is_given_up_and_the_others_are_not():
    class Panic(BaseException):
        pass

    class Broken(Work):
        def __call__(self) -> None:
            raise Panic

    threads = GrammarThreads(1, limit_s=60)
    for _ in range(2):
        assert are_done(threads, each_alone([Work(), Broken(), Work()])) == [True, False, True]
    assert threads.num_left_behind == 0


def test_time_in_which_others_have_the_processor_does_not_count():
    class Sleeper(Work):
        def __call__(self) -> None:
            time.sleep(0.3)
            super().__call__()

    (seconds,) = GrammarThreads(1, limit_s=0.1).run(each_alone([Sleeper()]))
    assert seconds is not None and seconds < 0.1


def test_the_seconds_of_a_group_are_its_own():
    works = [Work(), Work(spins_s=0.05), Work(), Work(spins_s=0.02)]
    seconds = [each or 0.0 for each in GrammarThreads(1, limit_s=60).run(each_alone(works))]
    assert seconds[1] >= 0.05 and 0.02 <= seconds[3] < 0.05
    assert max(seconds[0], seconds[2]) < 0.02


def test_memory_is_kept_while_a_thread_that_was_left_behind_may_write_to_it():
    threads = GrammarThreads(1, limit_s=0.05)
    endless, memory = Work(spins_s=PATIENCE_S), np.zeros(3)
    is_kept = weakref.ref(memory)
    threads.run(each_alone([endless]), memory)
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
    threads.run(each_alone([Work()]), memory)
    del memory
    deadline_s = time.monotonic() + PATIENCE_S
    while is_kept() is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
