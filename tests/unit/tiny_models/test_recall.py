"""Held-out questions: fair, reproducible, and never seen in training."""

import itertools
import random
import re

import pytest

from tests.support.cluster.recall_documents import recall_documents
from tiny_models.facts import is_held_out
from tiny_models.prose import filler_sentence
from tiny_models.recall import held_out_questions, is_right
from tiny_models.train.documents import Loss, recall_document, story_document

STATED_CODE = re.compile(r"The code of (.+?) is (\d+)\.")


@pytest.mark.parametrize("invented_names", [False, True])
def test_training_and_held_out_questions_share_no_pair_of_subject_and_code(invented_names: bool) -> None:
    documents = itertools.islice(recall_documents(0, 20), 500)
    trained = {pair for d in documents for pair in STATED_CODE.findall("".join(s.text for s in d))}
    questions = held_out_questions(100, invented_names=invented_names)
    asked = {pair for q in questions for pair in STATED_CODE.findall(q.prompt_text)}
    assert len(trained) > 1000 and len(asked) > 200
    assert not any(is_held_out(*pair) for pair in trained)
    assert all(is_held_out(*pair) for pair in asked)


def test_same_seed_same_questions_other_seed_others() -> None:
    assert held_out_questions(5, seed=3) == held_out_questions(5, seed=3)
    assert held_out_questions(5, seed=3) != held_out_questions(5, seed=4)


def test_distances_stay_in_range_and_are_what_they_say() -> None:
    for question in held_out_questions(60, min_distance=50, max_distance=400):
        between = question.prompt_text.split(question.answer, 1)[1].split("\nQuestion:")[0]
        assert len(between.split()) == question.distance
        assert 50 <= question.distance < 400


def test_chat_and_raw_form_state_the_same_fact_once_before_the_question() -> None:
    for question in held_out_questions(30):
        assert question.prompt_text.count(question.answer) == 1
        assert "".join(m["content"] for m in question.messages).count(question.answer) == 1
        assert question.messages[-1] == {"role": "user", "content": question.question}


def test_a_range_shorter_than_a_sentence_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 32"):
        held_out_questions(1, min_distance=50, max_distance=60)


@pytest.mark.parametrize(
    ("answer", "right"),
    [(" {code}.", True), ("It is {code}", True), ("", False), ("{code}1", False), ("000, no: {code}", False)],
)
def test_the_first_number_decides(answer: str, right: bool) -> None:
    question = held_out_questions(1)[0]
    assert is_right(question, answer.format(code=question.code)) is right


def test_recall_documents_mostly_count_answers_only() -> None:
    documents = list(itertools.islice(recall_documents(1, 5), 400))
    full = sum(all(s.loss is not Loss.IGNORED for s in d) for d in documents)
    assert 0.03 < full / len(documents) < 0.2
    assert all(any(s.loss is Loss.ANSWER for s in d) for d in documents)


def test_documents_of_one_row_share_no_subject() -> None:
    rng, taken = random.Random(0), set[str]()
    stated: list[str] = []
    for _ in range(5):
        text = "".join(s.text for s in recall_document(rng, taken, filler_sentence, 0))
        stated += {subject for subject, _code in STATED_CODE.findall(text)}
    assert len(stated) == len(set(stated)) > 5


def test_stories_count_what_the_model_tells() -> None:
    rng = random.Random(0)
    for _ in range(20):
        told = [s.text for s in story_document(rng) if s.loss is Loss.TEXT]
        assert told[-1] == "<|end|>" and "learned that" in told[-2]
