"""`headrace demo`: a small cluster on this machine answers two questions of one chat, calls a tool, and reports how."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from deploy.api import Message, RouterApi
from deploy.config import ClusterConfig, cluster_config
from deploy.runs import RunDirectory
from deploy.show import report_table
from deploy.stop_request import StopRequest
from deploy.supervisor import running_cluster
from headrace.config import load, read_yaml

MODEL = Path(__file__).parent / "demo_model"
MAX_TOKENS = 64
SHOWN_WORDS = 16  # of the beginning of a long message, and of its end


@dataclass(frozen=True)
class DemoTool:
    """A function on offer; `parameters` have their JSON types."""

    description: str
    parameters: Mapping[str, str]

    def as_json(self, name: str) -> dict[str, Any]:
        """The tool as a client of OpenAI's API declares it."""
        properties = {parameter: {"type": kind} for parameter, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return {"type": "function", "function": {"name": name, "description": self.description, "parameters": schema}}


@dataclass(frozen=True)
class DemoChat:
    """Two user messages of one chat.

    first   states many facts and asks for one
    second  asks for another of these facts
    answer  the right answer to the second
    order   asks, in a chat of its own, for what one of `tools` does
    tools   by name
    """

    first: str
    second: str
    answer: str
    order: str
    tools: Mapping[str, DemoTool]


def run_demo(runs: RunDirectory, console: Console) -> None:
    """Starts one prefill node, one decode node and the router; asks; stops all of it, on every failure too."""
    started_s = time.monotonic()
    stop = StopRequest()
    console.print("Starting one prefill node, one decode node and the router ...")
    with running_cluster(_demo_cluster(), runs, stop, show_node_logs=False) as cluster:
        console.print(f"Ready at {cluster.urls[0]} after {time.monotonic() - started_s:.1f} s.\n")
        chat = demo_chat()
        ask_two_questions(cluster.apis[0], chat, stop, console)
        order_a_call(cluster.apis[0], chat, stop, console)
        console.print("Stopping ...")
    console.print(f"Done in {time.monotonic() - started_s:.1f} s; nothing is left running.")


def demo_chat() -> DemoChat:
    file = Path(__file__).parent / "demo_chat.yaml"
    return load(DemoChat, read_yaml(file), str(file))


def ask_two_questions(api: RouterApi, chat: DemoChat, stop: StopRequest, console: Console) -> None:
    """The second prompt contains the first one and its answer, so both nodes have nearly all of it cached."""
    messages: list[Message] = []
    for title, question in (
        ("First turn: many facts, and a question about one", chat.first),
        ("Second turn of the same chat", chat.second),
    ):
        stop.check()
        messages.append({"role": "user", "content": question})
        console.print(Rule(title, align="left"))
        console.print(Text.assemble(("user   ", "bold"), shortened(question)), highlight=False)
        console.print(Text("model  ", "bold"), end="")
        answer = api.chat(messages, max_tokens=MAX_TOKENS, on_text=lambda text: console.out(text, end=""))
        console.print("\n")
        console.print(report_table(answer))
        console.print()
        messages.append({"role": "assistant", "content": answer.text})
    console.print(f"The right answer to the last question: {chat.answer}", highlight=False)


def order_a_call(api: RouterApi, chat: DemoChat, stop: StopRequest, console: Console) -> None:
    """A message with tools on offer; the model answers with a call, and nobody makes it."""
    stop.check()
    console.print(Rule(f"A chat with {len(chat.tools)} tools on offer", align="left"))
    console.print(Text.assemble(("user   ", "bold"), chat.order), highlight=False)
    message: Message = {"role": "user", "content": chat.order}
    tools = [tool.as_json(name) for name, tool in chat.tools.items()]
    answer = api.chat([message], max_tokens=MAX_TOKENS, on_text=lambda text: console.out(text, end=""), tools=tools)
    for name, arguments in answer.calls:
        console.print(Text.assemble(("call   ", "bold"), f"{name} {arguments}"), highlight=False)
    console.print()


def shortened(text: str) -> Text:
    """Beginning and end of a long message, with a dim note of the words left out between them."""
    words = text.split()
    left_out = len(words) - 2 * SHOWN_WORDS
    if left_out <= 0:
        return Text(text)
    return Text.assemble(
        " ".join(words[:SHOWN_WORDS]), (f" ... {left_out} words ... ", "dim"), " ".join(words[-SHOWN_WORDS:])
    )


def _demo_cluster() -> ClusterConfig:
    """Roles are fixed, so that prompts are handed over: nodes that have nothing else to do would not need that."""
    data = {"model": str(MODEL), "name": "demo", "router": {"port": 0, "roles": "fixed"}}
    return cluster_config(data, source="demo", base=MODEL)
