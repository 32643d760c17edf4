"""Train the tokenizer both models share: byte-level BPE, 4096 entries, every digit a token of its own.

All 256 bytes are in the alphabet, so any text encodes without an unknown token and any token ids decode.

    python -m tiny_models.train.tokenizer --data .work/train --out tiny_models/headrace-tiny-granite-h [--out FOLDER]
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tiny_models.chat import CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS
from tiny_models.facts import draw_fact
from tiny_models.prose import filler_sentence, story
from tiny_models.recall import raw_question

VOCAB_SIZE = 4096
MAX_TOKENS = 8192
NUM_TEMPLATE_TEXTS = 4000


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def training_texts(data: Path) -> Iterator[str]:
    """The books, and enough of our own sentences that their words become tokens."""
    rng = random.Random("tokenizer")
    for corpus in ("austen", "shakespeare"):
        yield from (data / f"{corpus}.txt").read_text().split("\n")
    for _ in range(NUM_TEMPLATE_TEXTS):
        fact = draw_fact(rng, set())
        yield f" {fact.statement} {filler_sentence(rng)} {fact.statement}{raw_question(fact.question)}"
        yield story(rng)


def main(
    data: Annotated[Path, typer.Option(help="folder with austen.txt and shakespeare.txt")],
    out: Annotated[list[Path], typer.Option(help="model folder to save it to; may be repeated")],
) -> None:
    """Trains the tokenizer that both models share."""
    tokenizer = train_tokenizer(training_texts(data))
    for folder in out:
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    typer.run(main)
