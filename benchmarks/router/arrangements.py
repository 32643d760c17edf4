"""Agents' chats on two nodes or more: undivided, fixed and elastic, simulated with step costs that are known.

    python -m benchmarks router-arrangements [--load "48 chats" --gap-ms 10] [--decode-us 28] [--nodes 4]

The loads and arrangements of `gpu-arrangements` where no GPU is at hand: the real policy, cache and scheduler, steps as
long as `StepCosts` says. Costs that are not given are its defaults, those of a model of 3 B parameters on an H200, and
those of hosts and router in `MEASURED_HOST`; `--no-hosts` leaves these out. A node has a cache of 50 GiB; shorter ones:

    python -m benchmarks router-arrangements --load "96 chats:12" --node-tokens 1_400_000 [--node-slots 170]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated

import typer

from benchmarks.cluster.arrangements import HEADER, LOADS, Work, simulated_row, works
from benchmarks.cluster.kinds import KINDS, Chunks, Contender
from benchmarks.cluster.twin import NODE_BLOCK_TOKENS, Measured
from benchmarks.pinned_drafts import GOLDEN
from benchmarks.router.host import MEASURED_HOST as HOST
from benchmarks.router.host import NO_HOST, HostCosts
from benchmarks.router.simulate import CHAT_BLOCK_TOKENS
from headrace.engine.pool_sizes import TOKENS_PER_STATE
from headrace.step_costs import StepCosts
from router.routing.candidates import LinkCosts

USUAL = StepCosts()
NODE_TOKENS = 4_160_000
"""Tokens of granite-h-micro in a cache of 50 GiB."""
LINK = LinkCosts(latency_s=0.5e-3, bytes_per_s=28e9)


def node_cache(num_tokens: int, num_slots: int | None, works: Sequence[Work]) -> tuple[int, int]:
    """Blocks and slots of a node whose cache holds so many tokens.

    `num_slots` None: one for each TOKENS_PER_STATE, as engines divide their memory. Raises BadParameter where a chat of
    the works does not fit: its last turn would wait for ever.
    """
    longest = max(works, key=lambda work: work.chats.last_tokens)
    least = -(-longest.chats.last_tokens // CHAT_BLOCK_TOKENS) * CHAT_BLOCK_TOKENS
    if num_tokens < least:
        raise typer.BadParameter(
            f"--node-tokens {num_tokens:,} is too little for one of {longest.load!r}: give {least:,} or more"
        )
    if num_slots is None:
        num_slots = max(1, num_tokens // TOKENS_PER_STATE)
    elif num_slots < 1:
        raise typer.BadParameter(f"--node-slots {num_slots}: a request takes one: give 1 or more, or leave it out")
    return num_tokens // NODE_BLOCK_TOKENS, num_slots


def main(
    load: Annotated[list[str], typer.Option(help=f"NAME[:GAP_MS[:CHATS]] of {', '.join(LOADS)}")] = ["48 chats"],  # noqa: B006
    gap_ms: Annotated[list[float], typer.Option(help="the objective between two tokens; 0: none")] = [10.0],  # noqa: B006
    later_first_ms: Annotated[float, typer.Option(help="that of later turns for their first token; 0: none")] = 0.0,
    kind: Annotated[list[str], typer.Option(help=f"of {', '.join(KINDS)}")] = [*KINDS],  # noqa: B006
    drafts: Annotated[
        list[int], typer.Option(min=0, max=len(GOLDEN), help="of an answer in a step at most; 0: none")
    ] = [0],  # noqa: B006
    chats: Annotated[int | None, typer.Option(help="in all, instead of the load's own number")] = None,
    nodes: Annotated[int, typer.Option(help="in all: two, four, ...")] = 2,
    node_tokens: Annotated[int, typer.Option(help="that a node's cache holds")] = NODE_TOKENS,
    node_slots: Annotated[
        int | None, typer.Option(help=f"for states in it, instead of one for each {TOKENS_PER_STATE} of its tokens")
    ] = None,
    step_ms: Annotated[float, typer.Option(help="of a step that decodes")] = 1e3 * USUAL.step_s,
    decode_us: Annotated[float, typer.Option(help="more for each decoding sequence")] = 1e6 * USUAL.decode_s,
    context_ns: Annotated[float, typer.Option(help="more for each token of a context")] = 1e9 * USUAL.context_s,
    chunk_ms: Annotated[float, typer.Option(help="more for a step that computes prompts")] = 1e3 * USUAL.chunk_s,
    token_us: Annotated[float, typer.Option(help="more for each token of a prompt")] = 1e6 * USUAL.token_s,
    depth_ps: Annotated[float, typer.Option(help="more for each position before that token")] = 1e12 * USUAL.depth_s,
    check_ms: Annotated[float, typer.Option(help="more for a step with drafts")] = 1e3 * USUAL.check_s,
    draft_us: Annotated[float, typer.Option(help="more for each draft")] = 1e6 * USUAL.draft_s,
    late_ms: Annotated[
        float, typer.Option(help="by which 95 of 100 steps with prompts beside answers are late at most")
    ] = 1e3 * USUAL.late_s,
    chunk_tokens: Annotated[int, typer.Option(help="engine.max_step_tokens of nodes that decode")] = 2048,
    prefill_chunk_tokens: Annotated[int, typer.Option(help="the same of nodes of the role prefill")] = 4096,
    prefill_token_us: Annotated[
        float | None, typer.Option(help="token-us of a node of that role, if not the same")
    ] = None,
    prefill_depth_ps: Annotated[float | None, typer.Option(help="its depth-ps")] = None,
    hosts: Annotated[bool, typer.Option(help="else nothing but devices takes time")] = True,
    open_steps: Annotated[bool, typer.Option(help="a step behind prompts alone is left open")] = HOST.leaves_open,
    answer_host_us: Annotated[float, typer.Option(help="of a node's turn, for each answer")] = 1e6 * HOST.answer_s,
    prompts_host_ms: Annotated[float, typer.Option(help="more for one with prompts")] = 1e3 * HOST.prompts_s,
    request_host_ms: Annotated[float, typer.Option(help="more for each request taken in")] = 1e3 * HOST.request_s,
    router_ms: Annotated[float, typer.Option(help="until a request's nodes are chosen")] = 1e3 * HOST.router_s,
) -> None:
    """Agents' chats on nodes of known costs, simulated."""
    costs = replace(
        USUAL,
        step_s=step_ms / 1e3,
        decode_s=decode_us / 1e6,
        context_s=context_ns / 1e9,
        chunk_s=chunk_ms / 1e3,
        token_s=token_us / 1e6,
        depth_s=depth_ps / 1e12,
        check_s=check_ms / 1e3,
        draft_s=draft_us / 1e6,
        late_s=late_ms / 1e3,
    )
    prefill_costs = replace(
        costs,
        token_s=costs.token_s if prefill_token_us is None else prefill_token_us / 1e6,
        depth_s=costs.depth_s if prefill_depth_ps is None else prefill_depth_ps / 1e12,
    )
    turn = HostCosts(
        True, open_steps, answer_host_us / 1e6, prompts_host_ms / 1e3, request_host_ms / 1e3, router_ms / 1e3
    )
    asked = [work.asking(later_first_ms) for each in load for work in works(each, gap_ms, chats)]
    measured = Measured(costs, prefill_costs, LINK, *node_cache(node_tokens, node_slots, asked))
    chunks = Chunks(prefill_chunk_tokens, chunk_tokens)
    print(HEADER, flush=True)
    for work in asked:
        rates: dict[Contender, float] = {}
        for contender in (Contender(name, num_drafts) for num_drafts, name in product(drafts, kind)):
            row = simulated_row(work, contender, nodes, measured, chunks, rates, turn if hosts else NO_HOST)
            rates[contender] = row.requests_per_s
            print(row, flush=True)
