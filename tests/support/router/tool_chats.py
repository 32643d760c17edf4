"""Fake nodes that answer with reasoning, content and two tool calls, as Qwen3.5 writes them."""

from router.text.tokens import ModelTokens
from tests.support.router.fake_nodes import FakeCluster
from tests.support.router.model_folder import STOP_ID

CALL = "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
CALL += "</function>\n</tool_call>"
ANSWER = f"I should look.\n</think>\n\nLet me see.\n\n{CALL.format('Paris')}\n{CALL.format('Rome')}"


def playing(cluster: FakeCluster, tokens: ModelTokens, text: str) -> FakeCluster:
    """The cluster, whose nodes answer every request with this text."""
    for node in cluster.nodes.values():
        node.answer = [*tokens.encode(text), STOP_ID]
    return cluster
