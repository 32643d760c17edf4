"""Candidates: frozen snapshots of nodes, all that a routing policy sees of the cluster. Pure.

Named tuples, which are made in a fifth of the time of frozen dataclasses: each decision makes some for every node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from headrace.cache.hits import PrefixHit
from headrace.step_costs import StepCosts
from headrace.wire.node_messages import Role

NO_HIT = PrefixHit(0, 0, 0)
SHORT_ANSWER_TOKENS = 30
"""Shorter answers count as so long where stalls are weighed: for those of three tokens no chat leaves its cache."""
MIN_GAP_TOKENS = 16
"""Tokens of prompts that a step computes at the least, however short the gap: prompts do not starve beside decodes."""
RECENT_S = 10.0
"""Memory of what nodes were busy with: a heartbeat of so long ago weighs 1/e of the newest."""
MIN_TOKEN_S = 1e-9
"""Seconds of a prompt's token where its cost was measured as 0."""


class Load(NamedTuple):
    """The work of a node: by its last heartbeat, and by what this router has sent it since.

    num_decoding      sequences that generate
    context_tokens    tokens of their contexts
    num_coming        sequences that will generate here once their prompts are computed, here or elsewhere
    coming_tokens     tokens of their prompts
    waiting_tokens    tokens of prompts that are to be computed, those that are being computed included
    waiting_depths    the positions of these tokens, summed; see `StepShape`
    waiting_lengths   the waiting tokens by how many their prompt has left: at index k those of prompts with 2**k up to
                      2**(k + 1) - 1; a node lets short prompts go before long ones
    num_waiting       prompts with waiting tokens
    recent_lengths    tokens a second of this router's prompts that were computed lately, by the length of the prompt as
                      in `waiting_lengths`
    free_tokens       tokens for which blocks are free or can be evicted, less those of the sequences that come
    free_slots        states for which a slot is free or can be evicted, less those of the sequences that come: negative
                      while some wait for one
    empty_tokens      tokens for which blocks were free at the last heartbeat, so that nothing need be evicted
    shortness         sum of 1 / expected tokens, at least SHORT_ANSWER_TOKENS, of this router's answers that generate
                      or come: a second in which the node does something else adds as many to their times per token
    prompt_share      share of the last seconds in which prompts waited: at most 1
    prompt_use        seconds of work on prompts, what waits included, in each of the last ones; without the rest of the
                      steps in which it was done
    coming_s          time to the first token that was predicted for the sequences that come, summed
    answer_pace       time of an answer's token as a share of a step's without drafts (router/routing/draft_pace.py)
    step_stretch      time of a step's answers as a multiple of that without drafts
    """

    num_decoding: int = 0
    context_tokens: int = 0
    num_coming: int = 0
    coming_tokens: int = 0
    waiting_tokens: int = 0
    waiting_depths: int = 0
    waiting_lengths: tuple[int, ...] = ()
    num_waiting: float = 0.0
    recent_lengths: tuple[float, ...] = ()
    free_tokens: int = 0
    free_slots: int = 0
    empty_tokens: int = 0
    shortness: float = 0.0
    prompt_share: float = 0.0
    prompt_use: float = 0.0
    coming_s: float = 0.0
    answer_pace: float = 1.0
    step_stretch: float = 1.0


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """The time to move bytes from one node to another: latency_s + bytes / bytes_per_s."""

    latency_s: float = 0.002
    bytes_per_s: float = 5e9

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


NO_LINKS: Mapping[str, LinkCosts] = MappingProxyType({})


class Candidate(NamedTuple):
    """One node, as it may serve one request.

    role               what the router prefers it for; BOTH: for either
    costs              what its steps take, by its own measurement
    chunk_tokens       the most tokens of prompts in one of its steps
    block_size         tokens of a block of its cache
    bytes_per_token    attention KV that travels for each token
    state_bytes        the state that travels for each request
    links              what sending to each other node takes, by name; a node that is missing cannot be sent to
    may_prefill        False: it only decodes, for its role is fixed, or its place is reserved for another's prompt
    may_decode         False: it only prefills, for its role is fixed, or another node must generate
    hit                how much of the prompt it holds or will hold soon, for each cache group; all but the last token
                       at most
    """

    name: str
    role: Role
    costs: StepCosts
    chunk_tokens: int
    block_size: int
    bytes_per_token: int
    state_bytes: int
    links: Mapping[str, LinkCosts] = NO_LINKS
    may_prefill: bool = True
    may_decode: bool = True
    load: Load = Load()
    hit: PrefixHit = NO_HIT

    def with_load(self, load: Load) -> Candidate:
        return tuple.__new__(Candidate, (*self[:-2], load, self.hit))  # in a fifth of the time of _replace

    def with_hit(self, hit: PrefixHit) -> Candidate:
        return tuple.__new__(Candidate, (*self[:-1], hit))
