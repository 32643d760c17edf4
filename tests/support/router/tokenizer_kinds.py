"""Small tokenizers of the kinds that model folders hold, one for each way of decoding."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<s>", "</s>"]
TEXT = [
    "The code of June is 471. A channel carries the stream over stones and under bridges;",
    "where it falls, a turbine spins and lamps begin to glow. Don't write a poem, say the birds.",
    "seven birds and one boat: é, ü and 世界 are characters, too",
]
VOCAB_SIZE = 200


def _byte_level() -> Tokenizer:
    """GPT-2, Qwen, Llama 3: a character may be split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def _unigram() -> Tokenizer:
    """T5: a space is part of the token after it, and dropped at the start of a text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """Llama 2: spaces as in T5, and a token for each byte of the characters that the vocabulary lacks."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    words = sorted({char for line in TEXT for char in line if char.isascii()} - {" "})
    vocabulary = {token: i for i, token in enumerate(["<unk>", *SPECIAL, *fallback, "▁", *words])}
    merges = []
    for first, second in (("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("o", "n"), ("▁", "c"), ("▁c", "o")):
        vocabulary[first + second] = len(vocabulary)
        merges.append((first, second))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return tokenizer


def _word_piece() -> Tokenizer:
    """BERT: the decoder writes a space before each token that does not continue a word."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def _word_ends() -> Tokenizer:
    """The first GPT: a word's last token ends in `</w>`, which decodes to a space except at the end of a text."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def _no_decoder() -> Tokenizer:
    """Whole words, joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": _byte_level,
    "unigram": _unigram,
    "byte_fallback": _byte_fallback,
    "word_piece": _word_piece,
    "word_ends": _word_ends,
    "no_decoder": _no_decoder,
}
