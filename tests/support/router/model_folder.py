"""A model folder as a router reads it: a byte-level tokenizer, a chat template, configs; no weights, no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_ID, START_ID, STOP_ID = 0, 1, 2
VOCAB_SIZE = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEXT = """The code of June is 471. A channel carries the stream over stones and under bridges; where it falls,
a turbine spins and lamps begin to glow. Please write a short poem which mentions seven birds and one boat."""


def write_model_folder(
    folder: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    max_tokens: int = 2048,
    added_tokens: Sequence[str] = ("<think>", "two words"),
) -> Path:
    """Creates and fills `folder`, and returns it. Ids 0 to 2 are END, START, STOP; END and STOP end sequences.

    added_tokens   are not special: part of the text
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, START, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens(list(added_tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"max_position_embeddings": max_tokens, "vocab_size": VOCAB_SIZE, "eos_token_id": END_ID}
    _write(folder / "config.json", {"text_config": config})
    _write(folder / "generation_config.json", {"eos_token_id": [END_ID, STOP_ID]})
    settings = {"eos_token": END, "bos_token": {"content": END}}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    _write(folder / "tokenizer_config.json", settings)
    return folder


def _write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))
