"""Grammars that answers obey, and which ids they allow next, by llguidance. No torch.

A grammar travels as text in llguidance's own form: JSON with a list of `grammars`, each a JSON schema or Lark grammar,
the first of which is the answer's. The router makes it, and refuses what `check_grammar` does; nodes compile it again.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from headrace.grammar_threads import GrammarThreads

MAX_LEXER_STATES = 25_000
"""States of one grammar's lexer, of 1 to 2 KiB each: an answer that leads to more of them fails."""
KEPT_GRAMMARS, KEPT_TEXT_BYTES = 64, 2 << 20
"""Compiled grammars that a node keeps, and the most that their texts may have together."""
NOT_DRAFTED = "// of a client: not drafted"
"""In a grammar: nothing is looked up ahead of its masks. llguidance computes masks without the GIL, but keeps it while
it follows tokens or finds what is forced: a grammar of 800 rules took it 55 s for that, in one call."""
GRAMMAR_THREADS = 8
WORK_LIMIT_S, ANSWER_ALLOWANCE_S, TOKEN_LIMIT_S = 0.5, 0.5, 0.005
"""Processor time: of one mask or one look at drafts, and of all of an answer, which may take the allowance and so much
for each mask. Of a vocabulary of 151,936 the dearest mask of benchmarks/engine/structured_output.py takes 1.5 ms. What
allows a token is looked at again when it is taken, so that this bounds that as well."""
MOST_LEFT_BEHIND = 4
"""Threads with work that nobody awaits, beyond which a node takes no new grammar."""
PROBED_BYTES, PROBE_LIMIT_S = 64, 0.25
"""Bytes of a random text that the router follows, and the processor time that they may take."""
WHITESPACE = r" {1,2}|\r?\n[ \t]{0,40}"
"""Whitespace between two parts of a JSON document: enough to indent it. Without a bound, models that have nothing to
say write spaces until `max_tokens`."""


class GrammarError(ValueError):
    """A grammar that cannot be held; the message says what in it, and where."""


@dataclass
class GrammarTime:
    """Processor time that one answer's masks and looks at its drafts have taken. `grammar`: its text."""

    grammar: str = ""
    num_masks: int = 0
    seconds: float = 0.0
    is_spent: bool = False

    def add(self, seconds: float | None, num_masks: int = 1) -> None:
        """More of it, for so many masks; None: it was given up."""
        self.num_masks += num_masks
        self.seconds += seconds or 0.0
        allowed_s = ANSWER_ALLOWANCE_S + TOKEN_LIMIT_S * self.num_masks
        self.is_spent = self.is_spent or seconds is None or self.seconds > allowed_s


class AnswerGrammar:
    """How far one answer has come in its grammar. One thread at a time may use it.

    time   spent on it; once that is too much, the matcher is not touched again: a thread that was left behind may
           still be in it
    """

    def __init__(self, matcher: LLMatcher, time: GrammarTime) -> None:
        self.matcher = matcher
        self.time = time

    @cached_property
    def takes_drafts(self) -> bool:
        """False for a client's own grammar: to look ahead in it may take a minute, in which no other thread runs."""
        return NOT_DRAFTED not in self.time.grammar

    def append(self, token_ids: Sequence[int]) -> None:
        """The answer's next tokens; afterwards `error` is set if the grammar does not allow them."""
        if not self.time.is_spent:
            self.matcher.consume_tokens(list(token_ids))

    def allowed(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The leading ones of these tokens after which the grammar allows another one, up to one that takes long."""
        if self.time.is_spent or not self.takes_drafts:
            return ()
        began_s, looked_s = time.thread_time(), time.perf_counter()
        further, num_allowed = self.matcher.deep_copy(), 0
        for token_id in token_ids:
            is_allowed = further.consume_token(token_id) and not further.is_stopped()
            before_s, looked_s = looked_s, time.perf_counter()
            if not is_allowed or looked_s - before_s > TOKEN_LIMIT_S:
                break
            num_allowed += 1
        self.time.add(time.thread_time() - began_s, num_masks=0)
        return token_ids[:num_allowed]

    def forced(self) -> list[int]:
        """Tokens of the only text that the grammar leaves next; none where it leaves a choice."""
        if self.time.is_spent or not self.takes_drafts:
            return []
        began_s = time.thread_time()
        tokens = self.matcher.compute_ff_tokens()
        self.time.add(time.thread_time() - began_s, num_masks=0)
        return tokens

    @property
    def is_complete(self) -> bool:
        """True if the answer is whole and nothing may follow it."""
        return not self.time.is_spent and self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why the grammar can be followed no further; None: it can."""
        if self.time.is_spent:
            return f"it takes more than {TOKEN_LIMIT_S * 1e3:g} ms a token: let fewer parts match the same text"
        return _first_line(self.matcher.get_error()) if self.matcher.is_error() else None


class Grammars:
    """The compiled grammars of one model: its tokenizer is loaded with the first of them.

    `answer` may be called by any thread, the rest by one at a time.
    """

    def __init__(self, tokenizer_file: Path | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._file = tokenizer_file
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._vocab_size = vocab_size
        self._loading = threading.Lock()
        self._loaded: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._given_up: OrderedDict[str, None] = OrderedDict()

    def answer(self, text: str, token_ids: Sequence[int] = ()) -> AnswerGrammar:
        """The grammar `text` after these tokens of the answer. Raises GrammarError."""
        with self._lock:
            if text in self._given_up:
                raise GrammarError("it took too much time in another answer: let fewer parts match the same text")
            compiled = self._compiled.get(text)
            if compiled is not None:
                self._compiled.move_to_end(text)
                compiled = compiled.deep_copy()
        if compiled is None:
            compiled = self._compile(text)
        answer = AnswerGrammar(compiled, GrammarTime(text))
        answer.append(token_ids)
        if answer.error is not None:
            raise GrammarError(f"the answer so far does not follow its grammar: {answer.error}")
        return answer

    def fill_masks(
        self,
        answers: Sequence[AnswerGrammar],
        drafts: Sequence[Sequence[int]],
        unwanted: Sequence[Iterable[int]],
        masks: NDArray[np.int32],
    ) -> None:
        """Writes the ids that may come after each answer and its drafts, a bit each, to `masks`. Leaves other threads
        the GIL, and gives up grammars that take too much time (`GrammarTime`).

        masks [len(answers), ceil(vocab_size / 32)]: rows without gaps, whose former values do not matter.

        unwanted[i] are ids that answer i may have only if its grammar leaves no other: end-of-sequence tokens that come
        too early. Where a grammar was given up, everything is allowed: something must be drawn. After an `error` a mask
        means nothing.
        """
        first, num_bytes = masks.ctypes.data, masks.strides[0]
        rows = [row for row, answer in enumerate(answers) if not answer.time.is_spent]
        fill = [
            partial(
                _fill,
                answers[row].matcher.deep_copy() if drafts[row] else answers[row].matcher,
                drafts[row],
                first + row * num_bytes,
                num_bytes,
            )
            for row in rows
        ]
        done = self._threads.run(fill, [answers[row].time.grammar for row in rows], masks)
        masks[[row for row, answer in enumerate(answers) if answer.time.is_spent]] = -1
        for row, result in zip(rows, done, strict=True):
            time = answers[row].time
            if result is None:
                time.add(None)
                self._give_up(time.grammar)
                masks[row] = -1
            else:
                time.add(result[1])
        _leave_out(unwanted, masks)

    def _give_up(self, text: str) -> None:
        """Refuses the grammar from now on: each answer by it would leave one more thread behind."""
        with self._lock:
            self._compiled.pop(text, None)
            self._given_up[text] = None
            while len(self._given_up) > KEPT_GRAMMARS:
                self._given_up.popitem(last=False)

    def _compile(self, text: str) -> LLMatcher:
        with self._lock:
            threads = self._threads  # made by the first to ask
        if threads.num_left_behind >= MOST_LEFT_BEHIND:
            raise GrammarError(f"{MOST_LEFT_BEHIND} grammars that were given up still take this node's time")
        matcher = LLMatcher(self._tokenizer(), text, log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))
        with self._lock:
            self._compiled[text] = matcher.deep_copy()
            while len(self._compiled) > KEPT_GRAMMARS or sum(map(len, self._compiled)) > KEPT_TEXT_BYTES:
                self._compiled.popitem(last=False)
        return matcher

    def _tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._loaded is None:
                if self._file is None:
                    raise GrammarError("this node has no tokenizer")
                try:
                    document = self._file.read_text(encoding="utf-8")
                    eos = self._eos_token_ids or None
                    self._loaded = LLTokenizer(document, n_vocab=self._vocab_size, eos_token=eos)
                except (OSError, ValueError) as error:
                    raise GrammarError(f"{self._file}: no tokenizer that grammars can use: {error}") from error
            return self._loaded

    @cached_property
    def _threads(self) -> GrammarThreads:
        return GrammarThreads(max(1, min(GRAMMAR_THREADS, (os.cpu_count() or 1) // 2)), WORK_LIMIT_S)


def _fill(matcher: LLMatcher, drafts: Sequence[int], address: int, num_bytes: int) -> None:
    """Writes the mask of what follows the drafts. Only the mask itself leaves other threads the GIL."""
    if drafts:
        matcher.consume_tokens(list(drafts))
    with suppress(ValueError):  # its own error says the same
        matcher.unsafe_compute_mask_ptr(address, num_bytes)


def _leave_out(unwanted: Sequence[Iterable[int]], masks: NDArray[np.int32]) -> None:
    """Takes the unwanted ids out of each mask that has others."""
    rows = np.array([row for row, ids in enumerate(unwanted) for _ in ids], np.intp)
    ids = np.array([token_id for each in unwanted for token_id in each], np.intp)
    if not len(ids):
        return
    words = masks.view(np.uint32)
    is_allowed = words[rows, ids // 32] >> (ids % 32).astype(np.uint32) & 1 != 0
    for row in set(rows[is_allowed].tolist()):  # seldom: within a document nothing may end
        kept = words[row].copy()
        for token_id in ids[is_allowed & (rows == row)].tolist():
            kept[token_id // 32] &= np.uint32(0xFFFFFFFF ^ 1 << token_id % 32)
        if kept.any():
            words[row] = kept


def json_grammar(schema: object) -> str:
    """The grammar of the documents that satisfy a JSON schema. Raises GrammarError if it is no object, nor `true`.

    The schema may have llguidance's options in `x-guidance`: `whitespace_flexible` false admits no whitespace.
    """
    if schema is not True and not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema must be an object, not {json.dumps(schema):.40}")
    try:
        plain: dict[str, Any] = {} if schema is True else _plain(schema)
        own = plain.get("x-guidance")
        has_whitespace = isinstance(own, dict) and any(name.startswith("whitespace") for name in own)
        defaults: Any = {} if has_whitespace else {"whitespace_pattern": WHITESPACE}
        strictly: Any = {"lenient": False}  # an unknown keyword is never ignored
        return LLMatcher.grammar_from_json_schema(plain, defaults, strictly)
    except (ValueError, RecursionError) as error:
        raise GrammarError(_first_line(str(error))) from error


_NEUTRAL: dict[str, Any] = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
_IDLE_WITHOUT = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "x-guidance"})


def _plain(schema: Any) -> Any:
    """The same schema without keywords that say nothing, which llguidance refuses, and with whole numbers as such.

    By JSON Schema 2020-12 `then` without `if` (core, 10.2.2) and `minContains` without `contains` (validation, 6.4) say
    nothing, and 2.0 is the integer 2.
    """
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if isinstance(schema, float) and schema.is_integer() and abs(schema) < 2**53:
        return int(schema)
    if not isinstance(schema, dict):
        return schema
    plain: dict[str, Any] = {}
    for name, value in schema.items():
        needs = _IDLE_WITHOUT.get(name)
        if value is _NEUTRAL.get(name, plain) or (needs is not None and not any(each in schema for each in needs)):
            continue
        if name in _VALUES:
            plain[name] = value
        elif name in _MAPS and isinstance(value, dict):
            plain[name] = {key: _plain(each) for key, each in value.items()}
        else:
            plain[name] = _plain(value)
    return plain


def lark_grammar(lark: str) -> str:
    """A grammar in llguidance's Lark syntax."""
    return json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False)


def client_grammar(lark: str) -> str:
    """A grammar that a client wrote in llguidance's Lark syntax."""
    return lark_grammar(f"{NOT_DRAFTED}\n{lark}")


def regex_grammar(regex: str) -> str:
    """The grammar of the texts that a regular expression matches as a whole."""
    return LLMatcher.grammar_from_regex(regex)


def check_grammar(text: str) -> None:
    """Raises GrammarError for a grammar that llguidance refuses, or that takes far too long for the first bytes of a
    random text. Special tokens are checked on the nodes; so is the time of each mask, for a walk finds no hidden part.
    """
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=_limits())
    if is_error:
        raise GrammarError(" ".join(messages[0].split()))
    matcher = LLMatcher(_bytes(), text, log_level=0, limits=_limits())
    dice, began_s = random.Random(0), time.thread_time()
    for _ in range(PROBED_BYTES):
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[:256].nonzero()[0]
        if not len(allowed):
            break
        matcher.consume_token(int(dice.choice(allowed)))
        if time.thread_time() - began_s > PROBE_LIMIT_S:
            raise GrammarError("it takes too long to follow: let fewer parts match the same text")
    if matcher.is_error() and "Current row has" in matcher.get_error():
        raise GrammarError(_first_line(matcher.get_error()))


@cache
def _bytes() -> LLTokenizer:
    """A tokenizer whose ids up to 255 are the bytes."""
    return LLTokenizer("byte")


def _limits() -> LLParserLimits:
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def _first_line(message: str) -> str:
    return message.partition("\n")[0]
