"""Masks in threads: one that takes too long costs the others nothing but a little time."""

import ctypes
import time

import numpy as np

from headrace.mask_threads import MaskThreads
from tests.support.patience import PATIENCE_S

WORDS = 3


class FakeMatcher:
    """Writes its number, after so many seconds of processor time; or until `is_over`."""

    def __init__(self, number: int, spins_s: float = 0.0) -> None:
        self.number, self.spins_s = number, spins_s
        self.is_over = False
        self.num_asked = 0

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_length: int, /) -> None:
        self.num_asked += 1
        began_s = time.thread_time()
        while time.thread_time() - began_s < self.spins_s and not self.is_over:
            pass
        ctypes.memset(trg_pointer, self.number, trg_length)


def filled(threads: MaskThreads, matchers: list[FakeMatcher]) -> tuple[list[int], list[bool]]:
    masks = np.full((len(matchers), WORDS), -1, np.int32)
    taken = threads.fill(matchers, masks, range(len(matchers)))
    bytes_of = masks.view(np.uint8)
    assert (bytes_of == bytes_of[:, :1]).all()
    return [int(row[0]) for row in bytes_of], [seconds is not None for seconds in taken]


def test_each_matcher_has_its_own_mask():
    for most in (1, 3):
        threads = MaskThreads(most, limit_s=60)
        for count in (1, 4, 5, 30):
            assert filled(threads, [FakeMatcher(n) for n in range(count)]) == (list(range(count)), [True] * count)
        assert threads.num_left_behind == 0
    assert threads.fill([], np.zeros((0, WORDS), np.int32), []) == []


def test_a_mask_that_takes_too_long_is_given_up_and_the_others_are_not():
    threads = MaskThreads(2, limit_s=0.1)
    matchers = [FakeMatcher(n) for n in range(10)]
    endless = FakeMatcher(99, spins_s=PATIENCE_S)
    matchers[4] = endless
    found, is_done = filled(threads, matchers)
    assert (found, is_done) == ([0, 1, 2, 3, 255, 5, 6, 7, 8, 9], [n != 4 for n in range(10)])
    assert threads.num_left_behind == 1
    assert filled(threads, [FakeMatcher(n) for n in range(10)]) == (list(range(10)), [True] * 10)
    assert [each.num_asked for each in matchers] == [1] * 10
    endless.is_over = True
    deadline_s = time.monotonic() + PATIENCE_S
    while threads.num_left_behind:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_of_a_grammar_that_takes_too_long_few_masks_are_tried():
    threads = MaskThreads(2, limit_s=0.1)
    endless = [FakeMatcher(99, spins_s=PATIENCE_S) for _ in range(12)]
    matchers = [*endless, FakeMatcher(7)]
    masks = np.full((len(matchers), WORDS), -1, np.int32)
    taken = threads.fill(matchers, masks, ["slow"] * 12 + ["quick"])
    assert [seconds is None for seconds in taken] == [True] * 12 + [False]
    assert sum(each.num_asked for each in endless) == threads.num_left_behind <= 2
    for each in endless:
        each.is_over = True


def test_a_mask_that_breaks_is_given_up_and_the_others_are_not():
    class Panic(BaseException):
        pass

    class Broken(FakeMatcher):
        def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_length: int, /) -> None:
            raise Panic

    threads = MaskThreads(1, limit_s=60)
    for _ in range(2):
        assert filled(threads, [FakeMatcher(1), Broken(2), FakeMatcher(3)]) == ([1, 255, 3], [True, False, True])
    assert threads.num_left_behind == 0


def test_time_in_which_others_have_the_processor_does_not_count():
    class Sleeper(FakeMatcher):
        def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_length: int, /) -> None:
            time.sleep(0.3)
            super().unsafe_compute_mask_ptr(trg_pointer, trg_length)

    assert filled(MaskThreads(1, limit_s=0.1), [Sleeper(7)]) == ([7], [True])
