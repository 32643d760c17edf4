"""A router over fake nodes that play a model which calls tools: `python -m tests.clients.scripted_router`.

Writes its URL to standard output, and ends when standard input does. The tiny models need not call tools for it: an
answer depends on how many tool results the prompt has, and on whether it must be JSON.
"""

import asyncio
import re
import sys
import tempfile
from pathlib import Path

from headrace.request import FinishReason, Request, Token
from router.config import RouterConfig
from router.server import RouterServer
from router.text.tokens import ModelTokens
from tests.support.router.fake_nodes import FakeNode, fake_cluster, node_info, node_status
from tests.support.router.model_folder import STOP_ID, write_model_folder
from tests.support.router.tool_template import TOOL_TEMPLATE

CALL = "<tool_call>\n<function={}>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
CITIES = ("Paris", "Rome")
LAST = "Done.\n</think>\n\nSun in Paris, rain in Rome."
DOCUMENT = '{"city": "Paris", "days": 3}'
RESULT = "<tool_response>"


def play(node: FakeNode, tokens: ModelTokens) -> None:
    """Makes the node answer by the prompt that it gets."""
    scripted = node.token

    def token(request: Request, place: int) -> tuple[Token, FinishReason | None]:
        prompt = tokens.decode(request.tokens[: request.num_prompt_tokens], skip_special_tokens=False)
        text = LAST
        num_results = prompt.count(RESULT)
        if (tool := re.search(r'"(\w*weather)"', prompt)) and num_results < len(CITIES):
            text = f"I look.\n</think>\n\n{CALL.format(tool[1], CITIES[num_results])}"
        elif tool:
            text = LAST
        elif request.sampling.grammar is not None:
            text = f"It is short.\n</think>\n\n{DOCUMENT}" if prompt.rstrip().endswith("<think>") else DOCUMENT
        node.answer = [*tokens.encode(text), STOP_ID]
        return scripted(request, place)

    node.token = token  # type: ignore[method-assign]


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = write_model_folder(Path(folder) / "scripted", chat_template=TOOL_TEMPLATE, max_tokens=8192)
        tokens = ModelTokens(model)
        cluster = fake_cluster([], eos_id=STOP_ID)
        for node in cluster.nodes.values():
            play(node, tokens)
        server = RouterServer(
            RouterConfig(model, port=0, control_port=0, heartbeat_s=600.0), connect_to=cluster.connect
        )
        await server.start()
        for name, node in cluster.nodes.items():
            server.nodes.register(node_info(name, node.role, max_model_tokens=8192), node_status())
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop()


if __name__ == "__main__":
    asyncio.run(main())
