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
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from headrace.answer_grammar import NOT_DRAFTED, AnswerGrammar, CompiledGrammar, first_line
from headrace.grammar_threads import GrammarThreads, WorkGroup

MAX_LEXER_STATES = 25_000
"""States of one grammar's lexer, of 1 to 2 KiB each: an answer that leads to more of them fails."""
KEPT_GRAMMARS, KEPT_TEXT_BYTES = 64, 2 << 20
"""Compiled grammars that a node keeps, and the most that their texts may have together. One that was compiled several
times counts as several."""
GRAMMAR_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
SHARED_BY = 8
"""Answers that a grammar was compiled for when another one of it is made, up to one for each thread. Their masks follow
each other (`CompiledGrammar`), about 30 us each at a vocabulary of 151,936. All 64 masks of a batch by one grammar took
2 ms of an H200's step of 5, in any number of threads."""
WORK_LIMIT_S = 0.5
"""Processor time of one mask."""
MOST_LEFT_BEHIND = 4
"""Threads with work that nobody awaits, beyond which a node takes no new grammar."""
PROBED_BYTES, PROBE_LIMIT_S = 64, 0.25
"""Bytes of a random text that the router follows, and the processor time that they may take."""
WHITESPACE = r" {1,2}|\r?\n[ \t]{0,40}"
"""Whitespace between two parts of a JSON document: enough to indent it. Without a bound, models that have nothing to
say write spaces until `max_tokens`."""


class GrammarError(ValueError):
    """A grammar that cannot be held; the message says what in it, and where."""


class Grammars:
    """The compiled grammars of one model: its tokenizer is loaded with the first of them.

    `answer` may be called by any thread, the rest by one at a time.

    num_threads   that compute masks
    """

    def __init__(
        self,
        tokenizer_file: Path | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_threads: int = GRAMMAR_THREADS,
    ) -> None:
        self._file = tokenizer_file
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._vocab_size = vocab_size
        self._num_threads = num_threads
        self._loading = threading.Lock()
        self._loaded: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, list[CompiledGrammar]] = OrderedDict()
        self._given_up: OrderedDict[str, None] = OrderedDict()

    def answer(self, text: str, token_ids: Sequence[int] = ()) -> AnswerGrammar:
        """The grammar `text` after these tokens of the answer. Raises GrammarError."""
        with self._lock:
            if text in self._given_up:
                raise GrammarError("it took too much time in another answer: let fewer parts match the same text")
            compiled = self._with_room(text)
        answer = (compiled or self._compile(text)).answer()
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
        rows_of: dict[CompiledGrammar, list[int]] = {}
        for row, answer in enumerate(answers):
            if not answer.is_spent:
                rows_of.setdefault(answer.compiled, []).append(row)
        groups = [
            WorkGroup(
                compiled.text,
                [
                    partial(
                        _fill, answers[row].copied_for(drafts[row]), drafts[row], first + row * num_bytes, num_bytes
                    )
                    for row in rows
                ],
            )
            for compiled, rows in rows_of.items()
        ]
        done = self._threads.run(groups, masks)
        for (compiled, rows), seconds in zip(rows_of.items(), done, strict=True):
            if seconds is None:
                self._give_up(compiled)
            else:
                for row in rows:
                    answers[row].time.add(seconds / len(rows))
        masks[[row for row, answer in enumerate(answers) if answer.is_spent]] = -1
        _leave_out(unwanted, masks)

    def _give_up(self, compiled: CompiledGrammar) -> None:
        """Ends all answers by the grammar, and refuses it from now on: each would leave one more thread behind."""
        with self._lock:
            for each in (compiled, *self._compiled.pop(compiled.text, ())):
                each.is_given_up = True
            self._given_up[compiled.text] = None
            while len(self._given_up) > KEPT_GRAMMARS:
                self._given_up.popitem(last=False)

    def _with_room(self, text: str) -> CompiledGrammar | None:
        """The compiled grammar of this text with the fewest answers; None: another one is to be compiled."""
        known = self._compiled.get(text)
        if known is None:
            return None
        self._compiled.move_to_end(text)
        fewest = min(known, key=lambda compiled: len(compiled.answers))
        is_full = len(fewest.answers) >= SHARED_BY and len(known) < self._num_threads
        return None if is_full else fewest

    def _compile(self, text: str) -> CompiledGrammar:
        with self._lock:
            threads = self._threads  # made by the first to ask
        if threads.num_left_behind >= MOST_LEFT_BEHIND:
            raise GrammarError(f"{MOST_LEFT_BEHIND} grammars that were given up still take this node's time")
        matcher = LLMatcher(self._tokenizer(), text, log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        compiled = CompiledGrammar(text, matcher)
        with self._lock:
            self._compiled.setdefault(text, []).append(compiled)
            while self._keeps_too_much():
                self._compiled.popitem(last=False)
        return compiled

    def _keeps_too_much(self) -> bool:
        counts = {text: len(known) for text, known in self._compiled.items()}
        num_bytes = sum(len(text) * count for text, count in counts.items())
        return sum(counts.values()) > KEPT_GRAMMARS or num_bytes > KEPT_TEXT_BYTES

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
        return GrammarThreads(self._num_threads, WORK_LIMIT_S)


def _fill(matcher: LLMatcher, drafts: Sequence[int], address: int, num_bytes: int) -> None:
    """Writes the mask of what follows the drafts. Only the mask itself leaves other threads the GIL."""
    if drafts:
        matcher.consume_tokens(list(drafts))
    with suppress(ValueError):  # its own `error` says the same, and others of its group go on
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
        raise GrammarError(first_line(str(error))) from error


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
        raise GrammarError(first_line(matcher.get_error()))


@cache
def _bytes() -> LLTokenizer:
    """A tokenizer whose ids up to 255 are the bytes."""
    return LLTokenizer("byte")


def _limits() -> LLParserLimits:
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
