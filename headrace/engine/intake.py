"""New requests of an engine: checked, hashed, and their grammars compiled, outside its thread. No tensors."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.cache.hashing import PrefixHasher
from headrace.cache.known_prompts import KnownPrompts
from headrace.engine.sampling.stopping import StopRules
from headrace.engine.sequence import Job, Sequence
from headrace.grammar import GrammarError, Grammars
from headrace.request import Request


class BadRequest(ValueError):
    """No node of this model can serve the request; the message names the reason."""


class RequestTooLarge(BadRequest):
    """The request can never fit this node; the message names what it needs and what there is."""


class Intake:
    """Makes sequences of jobs, for `Engine.submit`. Touches nothing that the engine's thread changes.

    num_blocks   of the node's pool: no request may need more
    """

    def __init__(
        self, rules: StopRules, grammars: Grammars, block_size: int, *, num_blocks: int, vocab_size: int
    ) -> None:
        self._rules = rules
        self._grammars = grammars
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._known_prompts = KnownPrompts()

    def sequence(self, job: Job) -> Sequence:
        """The job's sequence, known to fit. Before `submit`: `hash_prompt`, and `compile_grammar` if it has one.

        Raises BadRequest for a token outside the vocabulary, RequestTooLarge if it could never be admitted.
        """
        request = job.request
        self._require_known_tokens(request)
        if len(request.tokens) > self._rules.max_model_tokens:
            raise RequestTooLarge(
                f"{len(request.tokens)} tokens > {self._rules.max_model_tokens}, the model's length: shorten the prompt"
            )
        sequence = Sequence(job, PrefixHasher(self._block_size, request.salt))
        needed = -(-self._rules.last_computed(sequence) // self._block_size)
        if needed > self._num_blocks:
            raise RequestTooLarge(
                f"prompt and max_tokens need {needed} blocks of {self._block_size} tokens, the node has "
                f"{self._num_blocks}: lower max_tokens, or raise cache_bytes"
            )
        return sequence

    def hash_prompt(self, sequence: Sequence) -> Iterator[None]:
        """Hashes the blocks of a fresh sequence, some before each time it yields; to be exhausted before `submit`.

        From one thread only: it knows the prompts that came before.
        """
        request = sequence.request
        return self._known_prompts.hash(sequence.hasher, request.tokens, request.salt)

    def _require_known_tokens(self, request: Request) -> None:
        """An id outside the embedding table would crash the step, and with it the node."""
        if not request.tokens:
            raise BadRequest("the prompt has no tokens: give at least one")
        sampling = request.sampling
        named = (sampling.stop_token_ids, sampling.bias_ids, sampling.allowed_token_ids)
        words = (word.tokens for word in sampling.bad_words)
        largest = max(request.tokens.largest, *(max(ids, default=0) for ids in (*named, *words)))
        if largest >= self._vocab_size:
            raise BadRequest(f"token id {largest} is outside the model's vocabulary of {self._vocab_size}")

    def compile_grammar(self, sequence: Sequence) -> None:
        """Compiles the grammar of a sequence that has one, before `submit`; any thread may call it.

        Takes milliseconds, and the first one of a node a second. Raises BadRequest for a grammar that cannot be held,
        or that the answer so far does not follow.
        """
        text, num_prompt_tokens = sequence.request.sampling.grammar, sequence.request.num_prompt_tokens
        if text is not None:
            try:
                sequence.grammar = self._grammars.answer(text, sequence.request.tokens[num_prompt_tokens:])
            except GrammarError as error:
                raise BadRequest(f"grammar: {error}") from error
