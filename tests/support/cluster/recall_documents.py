"""Documents as the shipped models were trained on."""

import random
from collections.abc import Iterator

from tiny_models.prose import filler_sentence
from tiny_models.train.documents import Document, recall_document


def recall_documents(seed: int, max_filler_sentences: int) -> Iterator[Document]:
    """An endless stream, half of it chats."""
    rng = random.Random(f"recall {seed}")
    while True:
        yield recall_document(rng, set(), filler_sentence, rng.randint(0, max_filler_sentences))
