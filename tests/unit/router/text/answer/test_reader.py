"""An answer's reader goes with its last reference: nothing is left to the garbage collector."""

import gc
import weakref

import pytest

from router.text.answer.answer_format import AnswerFormat
from router.text.answer.incoming import Incoming
from tests.support.router.answers import SAMPLES, SCHEMAS


@pytest.mark.parametrize("ends", [True, False])
def test_readers_are_freed_without_the_garbage_collector(ends: bool):
    gc.collect()
    gc.disable()
    try:
        num_texts = _num_texts()
        for sample in SAMPLES:
            reader = AnswerFormat(sample.form, "think", sample.begins_reasoning, SCHEMAS).parser("id{}".format)
            assert reader is not None
            reader.push(sample.text)
            if ends:
                reader.finish()
            gone = weakref.ref(reader)
            del reader
            assert gone() is None, sample
        assert _num_texts() == num_texts
    finally:
        gc.enable()


def _num_texts() -> int:
    """Texts that readers read, and their steps hold: those of readers that are gone, too."""
    return sum(type(each) is Incoming for each in gc.get_objects())
