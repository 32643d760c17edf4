"""Recall through the cluster equals recall in one process, question by question.

The shipped models answer with codes stated early in the prompt: a state lost on the way, a stale one, or one of
another request shows as another answer.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.cluster.asking import ask_all
from tests.support.cluster.cluster import Cluster
from tests.support.engine.driving import GREEDY, request, run_all, small_engine, submit
from tiny_models.recall import RecallQuestion, held_out_questions, is_right

MODELS = Path(__file__).parents[2] / "tiny_models"
ANSWER_TOKENS = 24

pytestmark = pytest.mark.slow


def first_line(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode(tokens).split("\n")[0].strip()


def in_one_process(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    built = small_engine(model, cache_bytes=256 << 20)
    answers = []
    for first in range(0, len(prompts), 8):
        runs = []
        for prompt in prompts[first : first + 8]:
            runs.append(submit(built, request(prompt, replace(GREEDY, max_tokens=ANSWER_TOKENS))))
        run_all(built)
        answers += [run.tokens for run in runs]
        for run in runs:
            built.engine.release(run.sequence)
    return answers


@pytest.mark.parametrize("name", ["headrace-tiny-granite-h", "headrace-tiny-qwen3.5"])
async def test_questions_are_answered_alike(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    model, num_questions = MODELS / name, pytestconfig.getoption("--recall-questions")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    questions: list[RecallQuestion] = held_out_questions(
        num_questions, seed=7, min_distance=50, max_distance=400, encode=lambda text: tokenizer.encode(text).ids
    )
    prompts = [tokenizer.encode(question.prompt_text).ids for question in questions]
    with Cluster(model, tmp_path) as cluster:
        answers = await ask_all(cluster.url, prompts, at_once=8, num_tokens=ANSWER_TOKENS)
    through_cluster = [answer.tokens for answer in answers]
    assert {answer.report["path"] for answer in answers} == {"remote"}
    assert through_cluster == in_one_process(model, prompts)
    texts = [first_line(tokenizer, tokens) for tokens in through_cluster]
    num_right = sum(is_right(question, text) for question, text in zip(questions, texts, strict=True))
    print(f"{name}: {num_right} of {num_questions} right")
    assert num_right >= 0.9 * num_questions
