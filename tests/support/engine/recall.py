"""Recall questions for the shipped Qwen-type model, which has a layer that drafts."""

from pathlib import Path

from tokenizers import Tokenizer

from tiny_models.recall import held_out_questions

SHIPPED = Path(__file__).parents[3] / "tiny_models" / "headrace-tiny-qwen3.5"


def recall_prompts(number: int) -> list[list[int]]:
    """Prompts of questions that it was not trained on."""
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    questions = held_out_questions(number, seed=7, encode=lambda text: tokenizer.encode(text).ids)
    return [tokenizer.encode(question.prompt_text).ids for question in questions]
