"""A prefill engine and a decode engine driven together as their nodes drive them, in one thread."""

from dataclasses import dataclass, field, replace

import torch

from headrace.cache.hits import ReceiveState
from headrace.engine.build import BuiltEngine
from headrace.engine.sequence import Admitted, Finished, Halted, Sampled
from headrace.request import FinishReason, Request
from headrace.token_array import TokenArray
from tests.support.engine.drafters import steps
from tests.support.engine.driving import Run, resume_locally, run_all, submit


@dataclass
class Exchange:
    """One request in both engines. `computes_locally`: the decode engine prefills it itself."""

    request: Request
    computes_locally: bool
    decode: Run
    prefill: Run | None = None
    tokens: list[int] = field(default_factory=list)
    is_over: bool = False


class EnginePair:
    """Both engines; `open` are the exchanges that hold blocks or wait for them."""

    def __init__(self, prefill: BuiltEngine, decode: BuiltEngine) -> None:
        self.prefill = prefill
        self.decode = decode
        self.open: list[Exchange] = []

    def start(self, request: Request, *, computes_locally: bool) -> Exchange:
        hit_policy = resume_locally if computes_locally else lambda hit: ReceiveState()
        exchange = Exchange(request, computes_locally, submit(self.decode, request, hit_policy=hit_policy))
        self.open.append(exchange)
        return exchange

    def step(self) -> None:
        """One step of each engine, then what their events call for."""
        for built in (self.prefill, self.decode):
            built.engine.admit()
            built.engine.step()
            built.engine.cache.check()
        for exchange in list(self.open):
            self._advance(exchange)
        for built in (self.prefill, self.decode):
            built.engine.cache.check()

    def stop(self, exchange: Exchange) -> None:
        """The client stops reading: the answer so far is published, and the end is an event like any other."""
        self.decode.engine.finish(exchange.decode.sequence, FinishReason.STOP)

    def abort(self, exchange: Exchange) -> None:
        """The client disconnected: both engines release the request, in whatever phase it is."""
        for built, run in ((self.prefill, exchange.prefill), (self.decode, exchange.decode)):
            if run is not None:
                built.engine.release(run.sequence)
        exchange.is_over = True
        self.open.remove(exchange)

    def _advance(self, exchange: Exchange) -> None:
        for event in _drain(exchange.decode):
            match event:
                case Admitted(state_arrives=True):
                    exchange.prefill = submit(self.prefill, exchange.request, max_new=1)
                case Sampled(token):
                    exchange.tokens.append(token.id)
                case Finished():
                    self.abort(exchange)
        if exchange.prefill is not None:
            for event in _drain(exchange.prefill):
                if isinstance(event, Sampled):
                    self._transfer(exchange, event)

    def _transfer(self, exchange: Exchange, sampled: Sampled) -> None:
        assert exchange.prefill is not None
        exchange.tokens.append(sampled.token.id)
        if sampled.finish is not None:
            self.abort(exchange)
            return
        move(self.prefill, exchange.prefill, self.decode, exchange.decode)
        self.prefill.engine.release(exchange.prefill.sequence)
        exchange.prefill = None
        self.decode.engine.run_decode(exchange.decode.sequence, sampled.token.id)


def move(source: BuiltEngine, here: Run, target: BuiltEngine, there: Run) -> None:
    """Copies the prompt's blocks that `there` does not have, and its state."""
    claim, layout = there.sequence.held, source.layout
    first = claim.reused_tokens // layout.block_size
    last = -(-there.sequence.prompt_length // layout.block_size)
    blocks = torch.empty((last - first) * layout.block_bytes, dtype=torch.uint8)
    source.memory.gather_prompt(here.sequence.held.block_ids, layout.block_size, first, last - first, blocks)
    target.memory.scatter_blocks(claim.block_ids[first:last], blocks)
    state = torch.empty(layout.state_bytes, dtype=torch.uint8)
    source.memory.gather_state(here.sequence.state_slot, state)
    target.memory.scatter_state(claim.slot, state)


def _drain(run: Run) -> list:
    events = run.events[:]
    run.events.clear()
    return events


def answer_with_a_move(here: BuiltEngine, there: BuiltEngine, asked: Request, num_steps: int) -> list[int]:
    """The tokens of an answer that moves after so many steps: its context to the other engine, which goes on."""
    first = submit(here, asked)
    steps(here, num_steps)
    here.engine.halt(first.sequence)
    assert any(isinstance(event, Halted) for event in first.events)
    *tokens, newest = first.sequence.tokens
    max_new = len(asked.tokens) + asked.sampling.max_tokens - len(tokens)
    continued = replace(asked, tokens=TokenArray.of(tokens))
    second = submit(there, continued, hit_policy=lambda hit: ReceiveState(), max_new=max_new)
    there.engine.admit()
    move(here, first, there, second)
    here.engine.release(first.sequence)
    there.engine.run_decode(second.sequence, newest)
    run_all(there)
    there.engine.release(second.sequence)
    return first.tokens + second.tokens
