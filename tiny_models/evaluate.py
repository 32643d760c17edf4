"""Ask a model 200 held-out recall questions, raw and as chats, and print how many it answers, by distance.

    python -m tiny_models.evaluate --model tiny_models/headrace-tiny-qwen3.5 [--calls]

With --calls: 200 held-out tool questions instead, by the number of tools on offer; a right answer is one call, of the
right tool with the right arguments, as the router reads it.

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
from tiny_models.tool_questions import ToolQuestion, held_out_tool_questions, is_right_call
from tiny_models.tools import FORMAT_OF_MODEL

MAX_ANSWER_TOKENS = 24
MAX_CALL_TOKENS = 96
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


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_text: str,
    *,
    max_tokens: int = MAX_ANSWER_TOKENS,
    is_line: bool = True,
) -> str:
    """The model's continuation, up to the end of its turn, or of a line where that comes first."""
    encode = encoder(tokenizer)
    prompt = torch.tensor([encode(prompt_text)])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, *(encode("\n") if is_line else [])],
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


def evaluate_calls(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Iterable[ToolQuestion]
) -> list[tuple[ToolQuestion, str, bool]]:
    """Each question with the model's answer, and whether it is right."""
    call_format = FORMAT_OF_MODEL[model.config.model_type]
    outcomes = []
    for question in questions:
        prompt = question.prompt_text(call_format)
        answer = complete(model, tokenizer, prompt, max_tokens=MAX_CALL_TOKENS, is_line=False)
        outcomes.append((question, answer, is_right_call(question, answer, call_format)))
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


def print_calls(outcomes: Iterable[tuple[ToolQuestion, str, bool]], *, show_wrong: bool) -> None:
    by_number: dict[int, list[bool]] = {}
    for question, answer, right in outcomes:
        by_number.setdefault(len(question.tools), []).append(right)
        if show_wrong and not right:
            print(f"{question.name} {dict(question.arguments)}: {answer!r}")
    everything = [right for each in by_number.values() for right in each]
    print("| tools on offer | right |\n|---|---|")
    for number, found in [*sorted(by_number.items()), ("all", everything)]:
        print(f"| {number} | {sum(found)}/{len(found)} |")


def main(
    model: Annotated[Path, typer.Option()],
    count: int = 200,
    seed: int = 0,
    invented_names: Annotated[
        bool, typer.Option("--invented-names", help="names no list holds, codes of 2 to 5 digits")
    ] = False,
    calls: Annotated[bool, typer.Option("--calls", help="tool questions instead")] = False,
    show_wrong: Annotated[bool, typer.Option("--show-wrong", help="also print wrong answers")] = False,
) -> None:
    """Asks a model held-out recall questions and prints how many it answers, by distance; or tool questions."""
    loaded, tokenizer = load(model)
    if calls:
        print_calls(evaluate_calls(loaded, tokenizer, held_out_tool_questions(count, seed)), show_wrong=show_wrong)
        return
    questions = held_out_questions(count, seed, encode=encoder(tokenizer), invented_names=invented_names)
    outcomes = evaluate(loaded, tokenizer, questions)
    print(table(outcomes))
    if show_wrong:
        for outcome in outcomes:
            if not outcome.right:
                print(f"{outcome.form}, {outcome.question.answer!r}: {outcome.answer_text!r}")


if __name__ == "__main__":
    typer.run(main)
