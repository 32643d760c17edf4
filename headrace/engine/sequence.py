"""A request inside one engine: its job, its events, and its progress."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from headrace.answer_grammar import AnswerGrammar
from headrace.cache.claims import Claim
from headrace.cache.hashing import PrefixHasher
from headrace.cache.hits import HitPolicy, PrefixHit, ResumeAgain, ResumeLocally
from headrace.cache.index import Checkpoint
from headrace.cache.leases import LeaseId
from headrace.cache.tails import BehindCheck, Tail
from headrace.cache.types import PrefixKey
from headrace.engine.sampling.bad_words import BadWords
from headrace.engine.sampling.draw import Draw
from headrace.engine.scheduling.following import Following
from headrace.request import FinishReason, PromptLogprobs, Request, Token
from headrace.speculation.draft_count import Acceptance
from headrace.speculation.drafter import Drafter

Arrival: TypeAlias = tuple[float, int]
"""Seconds, then a number that tells sequences of the same moment apart: lines and preemptions go by it."""


class DeviceEvent(Protocol):
    """A point in the work queued on a device: a torch.cuda.Event, without importing torch."""

    def query(self) -> bool:
        """True once the device has reached it."""
        ...

    def synchronize(self) -> None:
        """Blocks until the device has reached it."""
        ...


@dataclass(frozen=True)
class Admitted:
    """The request has its blocks and a slot; `reused_tokens` need neither computing nor receiving.

    Re-admission after a preemption sends no event; after `Engine.prefill_locally` it sends another one.

    state_arrives   the engine computes nothing before `run_decode` (the whole prompt has been received) or
                    `resume_prefill` (a part of it has)
    device_event    other requests' work on these blocks, reused or new, ends there
    """

    hit: PrefixHit
    reused_tokens: int
    state_arrives: bool
    device_event: DeviceEvent | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Started:
    """The first chunk of the prompt is in the step that is being launched: until now it waited for other prompts."""


@dataclass(frozen=True)
class Computed:
    """The prompt's first `num_tokens` tokens are computed, blocks and state, once the device reaches `device_event`.

    Only ever grows: tokens that are computed again after a preemption are not reported again.
    """

    num_tokens: int
    device_event: DeviceEvent | None = field(default=None, compare=False)


class Sampled(NamedTuple):
    """A new token; with `finish` it is the last one. A tuple, as a step makes one for each sequence."""

    token: Token
    finish: FinishReason | None


@dataclass(frozen=True)
class Scored:
    """Logprobs of the next tokens of the prompt, in order; the last of them come before the first `Sampled`."""

    logprobs: PromptLogprobs


@dataclass(frozen=True)
class Finished:
    """No more tokens follow: after `Sampled.finish`, after `Engine.finish`, or because none was requested."""

    reason: FinishReason


@dataclass(frozen=True)
class Halted:
    """The answer to `Engine.halt`: no token follows until `Engine.unhalt`.

    computed  all tokens but the last one: their blocks and the state behind them are final, and stay. None: the request
              was preempted or still prefills. It was not halted, and goes on by itself
    """

    computed: Computed | None


@dataclass(frozen=True)
class AdmissionTimedOut:
    """The cache had no capacity for the request before its deadline, or the line before it would last longer than that.

    The request holds nothing.
    """

    message: str


@dataclass(frozen=True)
class Failed:
    """The engine gives the request up: it computes nothing of it any more."""

    error: Exception


Event = Admitted | Started | Computed | Sampled | Scored | Finished | Halted | AdmissionTimedOut | Failed


@dataclass(frozen=True)
class Job:
    """A node's order to its engine for one request.

    hit_policy   chooses how much of the local hit is reused: with `ResumeLocally` this engine prefills, with
                 `ReceiveState` it waits for the state
    max_new      how many tokens may follow the prompt in this engine: at most 1 on a prefill node
    admit_by_s   deadline for admission, on the engine's clock
    yield_by_s   another deadline for admission. It counts while requests hold room here and wait for prompts of other
                 nodes: one of these nodes may itself lack the room that this job's request holds there until its
                 prompt arrives. None: only `admit_by_s` counts
    on_event     called in the engine's thread
    compute_by_s   deadline for computing the prompt: refused at once when the line before it would last longer, by the
                   measured speed; None: it waits however long the line is
    is_sent      its blocks are sent away while it is computed: it cannot be computed again, into other blocks
    prompt_logprobs   alternatives to report for each token of the prompt, None: the prompt is not scored
    """

    request: Request
    hit_policy: Callable[[PrefixHit], HitPolicy]
    max_new: int
    admit_by_s: float
    on_event: Callable[[Event], None]
    yield_by_s: float | None = None
    compute_by_s: float | None = None
    is_sent: bool = False
    prompt_logprobs: int | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """A job's progress. Owned by the engine's thread; nodes keep it as a handle and read its `claim`.

    It has slots, as a dict of so many fields is 1.6 kB: those of 64 sequences would exceed a core's first cache.

    tokens           prompt and answer so far, in one piece of memory: garbage collections do not visit each
    most_tokens      of prompt and answer, by its job and its request
    same_draw        the draw of each of its tokens, where that is always the best one of the model's logits; else None
    arrival          when the router took it in, on the engine's clock; its place in every order
    client_work      what its client's requests have taken of this engine lately, in tokens at depth 0
    is_over_share    its client has taken more than its share: the sequence yields to those of other clients
    num_expected     tokens that are computed here before it decodes, by the cache hit when it began to wait
    is_started       its first chunk has been launched, or its prompt has been received
    is_paused        it takes no part in steps, because too many of its tokens wait to be sent
    following        its wait for a prefix that another sequence is computing; None: it waits for none
    follow_until     it waits for no prefix once the engine has computed this many tokens of prompts in all
    parts_at         positions, in tokens, at which the prompts that wait for this one part from it
    hit_policy       how much it reuses when it is admitted next
    num_computed     leading tokens whose blocks and state are written
    prefill_length   leading tokens to compute in chunks before it decodes token by token: those it is submitted
                     with, and after a preemption also the answer so far
    computed_before  leading tokens that had been computed when it was last preempted
    num_preemptions  how often it was preempted
    num_prefilled    tokens of the prompt that were computed here, each counted once
    num_sampled      tokens that followed the prompt here; on a decode node the first was sampled elsewhere
    bad_words        its bad words of several tokens; None: it has none
    num_scored       leading tokens of the prompt after which the next one's logprob has been reported
    prompt_checkpoint_positions   of the checkpoints published for it in its prompt
    answer_checkpoints            checkpoints in its answer that are still kept
    drafts           drafts behind its newest token in the newest step, known or still being made; (): it has none there
    behind           the check in flight behind which its next chunk begins; None: the place of that chunk is known
    drafter          guesses how it goes on; None: it has not drafted
    acceptance       how often its drafts were accepted lately; None: it had none
    num_noted        leading tokens that the model's layer knows to occur, if it drafts
    drafted_tokens   tokens drafted for it here, and accepted_tokens of these
    grammar          how far its answer has come in the grammar that it obeys; None: it obeys none
    tail             its row of the rings, and what its state has behind it; None: the state in its slot is the newest
    """

    job: Job
    hasher: PrefixHasher
    tokens: array[int] = field(init=False)
    most_tokens: int = field(init=False)
    same_draw: Draw | None = field(init=False)
    arrival: Arrival = (0.0, 0)
    client_work: float = 0.0
    is_over_share: bool = False
    num_expected: int = 0
    is_started: bool = False
    is_paused: bool = False
    following: Following | None = None
    follow_until: float = math.inf
    parts_at: tuple[int, ...] = ()
    claim: Claim | None = None
    lease: LeaseId | None = None
    hit_policy: Callable[[PrefixHit], HitPolicy] = field(init=False)
    bad_words: BadWords | None = field(init=False)
    num_computed: int = 0
    prefill_length: int = field(init=False)
    computed_before: int = 0
    num_preemptions: int = 0
    num_prefilled: int = 0
    num_sampled: int = 0
    num_scored: int = 0
    prompt_checkpoint_positions: list[int] = field(default_factory=list)
    answer_checkpoints: list[Checkpoint] = field(default_factory=list)
    drafts: SequenceOf[int] = ()
    behind: BehindCheck | None = None
    drafter: Drafter | None = None
    acceptance: Acceptance | None = None
    num_noted: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    grammar: AnswerGrammar | None = None
    tail: Tail | None = None

    def __post_init__(self) -> None:
        self.hit_policy = self.job.hit_policy
        self.tokens = self.request.tokens.growing()
        self.prefill_length = len(self.tokens)
        words = [word.tokens for word in self.request.sampling.bad_words if len(word.tokens) > 1]
        self.bad_words = BadWords(words) if words else None
        self.most_tokens = min(
            self.prompt_length + self.job.max_new, self.request.num_prompt_tokens + self.request.sampling.max_tokens
        )
        self.same_draw = self._same_draw()

    def append(self, token_id: int) -> None:
        """Adds the newest token of the answer."""
        self.extend([token_id])

    def extend(self, token_ids: list[int]) -> None:
        """Adds the newest tokens of the answer, in order."""
        self.tokens.extend(token_ids)
        if len(self.tokens) // self.hasher.block_size > len(self.keys):  # as for few tokens
            self.hasher.extend(self.tokens[self.hasher.num_tokens :])
        if self.grammar is not None:
            self.grammar.append(token_ids)
        self.num_sampled += len(token_ids)

    def start_over(self) -> None:
        """Resets a preempted sequence: it prefills all its tokens, from the blocks still cached here, and continues.

        The first token sampled after that is the next one: those of `tokens` are not sampled again.
        """
        self.hit_policy = _resume_again
        self.computed_before = max(self.computed_before, self.num_computed)
        self.num_computed = 0
        self.prefill_length = len(self.tokens)
        self.num_preemptions += 1

    def prefill_locally(self) -> None:
        """Makes a sequence whose state does not arrive prefill from the blocks cached here."""
        self.hit_policy = _resume_locally

    @property
    def request(self) -> Request:
        return self.job.request

    @property
    def keys(self) -> list[PrefixKey]:
        """Prefix keys of its full blocks; the list grows in place."""
        return self.hasher.keys

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Positions for checkpoints, in tokens: the router's hints, and where others part that wait for this one."""
        return self.job.request.boundaries + self.parts_at

    @property
    def may_be_admitted(self) -> bool:
        return not self.is_paused and self.following is None

    @property
    def token_gap_s(self) -> float | None:
        """Seconds wanted between two of its tokens; None: no bound."""
        return self.job.request.token_gap_s

    @property
    def prompt_length(self) -> int:
        """Tokens it came with: the prompt and the tokens generated elsewhere before."""
        return len(self.job.request.tokens)

    def _same_draw(self) -> Draw | None:
        sampling = self.request.sampling
        if sampling.has_bias or sampling.min_tokens or sampling.grammar is not None or not self.draws_alike:
            return None
        draw = Draw(sampling, position=0)
        return draw if draw.is_greedy else None

    @property
    def draws_alike(self) -> bool:
        """True if its next tokens are drawn by logits and positions alone, whatever the tokens before them are."""
        sampling = self.job.request.sampling
        is_changed = sampling.has_penalty or sampling.min_tokens > self.num_output
        return not is_changed and self.bad_words is None and self.grammar is None

    @property
    def num_pending(self) -> int:
        """Tokens of the check that it stands behind, at most."""
        return 0 if self.behind is None else 1 + self.behind.num_drafts

    @property
    def num_output(self) -> int:
        """Generated tokens since the prompt, by any node."""
        return len(self.tokens) - self.job.request.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_length

    @property
    def is_confused(self) -> bool:
        """True if its grammar can be followed no further, so that no mask of it means anything."""
        return self.grammar is not None and self.grammar.error is not None

    def admit_by_s(self, *, others_hold_room: bool) -> float:
        """Deadline for its admission. `others_hold_room`: see `Job.yield_by_s`."""
        job = self.job
        deadlines = (job.admit_by_s, job.yield_by_s if others_hold_room else None)
        return min(each for each in deadlines if each is not None)

    @property
    def to_score(self) -> range:
        """Leading tokens of the prompt whose next tokens' logprobs have yet to be reported.

        The prompt's last token is among them: it predicts no other, but only with it all logprobs are reported.
        """
        end = 0 if self.job.prompt_logprobs is None else self.request.num_prompt_tokens
        return range(self.num_scored, end)

    @property
    def held(self) -> Claim:
        if self.claim is None:
            raise RuntimeError(f"request {self.request.request_id} holds nothing: not admitted, or released")
        return self.claim

    @property
    def state_slot(self) -> int:
        """The slot that holds its state, the one before its tail if it has one."""
        return self.held.state_slot

    @property
    def all_checkpoints(self) -> tuple[int, ...]:
        """Positions of all its checkpoints, each once: one that was evicted may be published again."""
        in_answer = (checkpoint.num_tokens for checkpoint in self.answer_checkpoints)
        return tuple(dict.fromkeys((*self.prompt_checkpoint_positions, *in_answer)))


def _resume_locally(hit: PrefixHit) -> HitPolicy:
    return ResumeLocally()


def _resume_again(hit: PrefixHit) -> HitPolicy:
    """After a preemption the sequence is always recomputed locally, wherever its state came from at first."""
    return ResumeAgain()
