"""`headrace demo`: a small cluster on this machine answers two questions of one chat, and shows where the work went."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

import tiny_models
from deploy.api import Message, RouterApi
from deploy.config import ClusterConfig, Overrides, cluster_from_options
from deploy.runs import RunDirectory
from deploy.show import report_table
from deploy.stop_request import StopRequest
from deploy.supervisor import running_cluster
from tiny_models.recall import RecallQuestion, held_out_questions

MODEL = Path(tiny_models.__file__).parent / "headrace-tiny-qwen3.5"
MAX_TOKENS = 48
MIN_WORDS = 300  # between a fact and the question for it
SHOWN_CHARACTERS = 200


def run_demo(runs: RunDirectory, console: Console) -> None:
    """Starts one prefill node, one decode node and the router; asks; stops all of it, whatever happens."""
    started_s = time.monotonic()
    stop = StopRequest()
    console.print("Starting one prefill node, one decode node and the router ...")
    with running_cluster(_demo_cluster(), runs, stop, show_node_logs=False) as cluster:
        console.print(f"Ready at {cluster.url} after {time.monotonic() - started_s:.1f} s.")
        ask_two_questions(RouterApi(cluster.url), demo_question(), stop, console)
        console.print("Stopping ...")
    console.print(f"Done in {time.monotonic() - started_s:.1f} s; nothing is left running.")


def demo_question() -> RecallQuestion:
    """A chat whose first message states many facts and asks for one; its second turn asks for another."""
    questions = held_out_questions(3, min_distance=MIN_WORDS, max_distance=2 * MIN_WORDS)
    return next(question for question in questions if question.layout == "second_turn")


def ask_two_questions(api: RouterApi, recall: RecallQuestion, stop: StopRequest, console: Console) -> None:
    """The second turn holds the first one and its answer: its prompt is nearly all cached, on both nodes."""
    first, _, second = recall.messages
    messages: list[Message] = []
    for title, message in (
        ("First turn: many facts, and a question about one", first),
        ("Second turn of the same chat", second),
    ):
        stop.check()
        messages.append({"role": "user", "content": message["content"]})
        console.print(Rule(title, align="left"))
        console.print(Text.assemble(("user", "bold"), "   ", _shortened(message["content"])), highlight=False)
        console.out("model  ", end="")
        answer = api.chat(messages, max_tokens=MAX_TOKENS, on_text=lambda text: console.out(text, end=""))
        console.print("\n")
        console.print(report_table(answer))
        messages.append({"role": "assistant", "content": answer.text})
    console.print(f"\nThe right answer to the last question: {recall.answer}", highlight=False)


def _demo_cluster() -> ClusterConfig:
    return cluster_from_options(None, Overrides(model=MODEL, name="demo", port=0))


def _shortened(text: str) -> str:
    """Beginning and end of a long message."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} [dim]... {len(text) - 2 * half} characters ...[/dim] {text[-half:]}"
