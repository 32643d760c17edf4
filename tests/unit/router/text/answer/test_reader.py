"""An answer's reader goes with its last reference: nothing is left to the garbage collector."""

import gc
import weakref

import pytest

from router.text.answer.answer_format import AnswerFormat
from tests.support.router.answers import SAMPLES, SCHEMAS


@pytest.mark.parametrize("ends", [True, False])
def test_readers_are_freed_without_the_garbage_collector(ends: bool):
    gc.collect()
    gc.disable()
    try:
        for sample in SAMPLES:
            reader = AnswerFormat(sample.form, "think", sample.begins_reasoning, SCHEMAS).parser("id{}".format)
            assert reader is not None
            reader.push(sample.text)
            if ends:
                reader.finish()
            gone = weakref.ref(reader)
            del reader
            assert gone() is None, sample
        assert gc.collect() == 0
    finally:
        gc.enable()
