"""Ask a model 200 held-out recall questions, raw and as chats, and print how many it answers, by distance.

    python -m tiny_models.evaluate --model tiny_models/headrace-tiny-qwen3.5

Greedy decoding with transformers in float32 on the CPU, one question at a time: the slow and sure way, about four
minutes on one core.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tiny_models.recall import RecallQuestion, held_out_questions, is_right

MAX_ANSWER_TOKENS = 24
DISTANCE_EDGES = (50, 100, 200, 300, 400)


@dataclass(frozen=True, slots=True)
class Outcome:
    question: RecallQuestion
    form: str
    """`raw`, or `chat` and its layout."""
    answer_text: str

    @property
    def right(self) -> bool:
        return is_right(self.question, self.answer_text)


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    return functools.partial(tokenizer.encode, add_special_tokens=False)


def complete(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt_text: str) -> str:
    """The model's continuation, up to the end of a line or of its turn."""
    encode = encoder(tokenizer)
    prompt = torch.tensor([encode(prompt_text)])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=MAX_ANSWER_TOKENS,
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, *encode("\n")],
    )
    return tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True).strip()


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Iterable[RecallQuestion]
) -> list[Outcome]:
    """Every question twice: raw, then as a chat."""
    outcomes = []
    for question in questions:
        chat = tokenizer.apply_chat_template(list(question.messages), tokenize=False, add_generation_prompt=True)
        outcomes.append(Outcome(question, "raw", complete(model, tokenizer, question.prompt_text)))
        outcomes.append(Outcome(question, f"chat, {question.layout}", complete(model, tokenizer, chat)))
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    """A Markdown table: right / asked, by form and distance in tokens."""
    spans = list(itertools.pairwise(DISTANCE_EDGES))
    lines = [
        "| form | " + " | ".join(f"{low} to {high} tokens" for low, high in spans) + " | all |",
        "|---|" + "---|" * (len(spans) + 1),
    ]
    for form in sorted({outcome.form for outcome in outcomes}, reverse=True):
        ours = [outcome for outcome in outcomes if outcome.form == form]
        cells = [[o for o in ours if low <= o.question.distance < high] for low, high in spans]
        lines.append(f"| {form} | " + " | ".join(score(cell) for cell in [*cells, ours]) + " |")
    return "\n".join(lines)


def score(outcomes: list[Outcome]) -> str:
    return f"{sum(outcome.right for outcome in outcomes)}/{len(outcomes)}"


def main(
    model: Annotated[Path, typer.Option()],
    count: int = 200,
    seed: int = 0,
    invented_names: Annotated[
        bool, typer.Option("--invented-names", help="names no list holds, codes of 2 to 5 digits")
    ] = False,
    show_wrong: Annotated[bool, typer.Option("--show-wrong", help="also print wrong answers")] = False,
) -> None:
    """Asks a model held-out recall questions and prints how many it answers, by distance."""
    loaded, tokenizer = load(model)
    questions = held_out_questions(count, seed, encode=encoder(tokenizer), invented_names=invented_names)
    outcomes = evaluate(loaded, tokenizer, questions)
    print(table(outcomes))
    if show_wrong:
        for outcome in outcomes:
            if not outcome.right:
                print(f"{outcome.form}, {outcome.question.answer!r}: {outcome.answer_text!r}")


if __name__ == "__main__":
    typer.run(main)
