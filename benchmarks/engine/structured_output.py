"""Structured output: which schemas are held, what a mask costs, and what grammars cost decoding.

    python -m benchmarks structured-output [--suite JSON-Schema-Test-Suite/tests/draft2020-12] [--tokenizer FILE]
    python -m benchmarks structured-decode [--device cuda --shape qwen35-4b --cache-gib 16] [--batch 64]

`structured-output`: each schema of the suite is compiled as the router compiles it, and each of its documents, written
in two ways, is followed token by token. Then random answers to four schemas, with the processor time of each mask,
and whole steps of 64 answers to one, by the wall clock, in more and more threads.
Without `--tokenizer` the vocabulary is made of the words of this machine's Python packages: its size and its trie are
like a real one's, its merges are not.

`structured-decode`: a model of random weights with that vocabulary, a batch of answers whose grammar never ends beside
the same batch without, in turn. Then the host's time in a step, part by part: while it waits for the device, what it
does costs nothing, and what a step with grammars takes longer is the device's.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer
from llguidance import LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.engine.steps import Batch, greedy
from benchmarks.shapes import SHAPES, TINY_MODELS, random_prompts
from benchmarks.timing import compare, table_header, table_row
from headrace.answer_grammar import AnswerGrammar
from headrace.engine import runner
from headrace.engine.build import BuiltEngine, engine_around
from headrace.engine.config import EngineConfig
from headrace.engine.sampling.sampler import Drawn
from headrace.forward.memory import use_device
from headrace.grammar import GrammarError, Grammars, check_grammar, json_grammar
from headrace.models.weights import load_config, random_model

VOCABULARY = 151_936  # of Qwen 2.5 and 3
ANSWERS, MOST_TOKENS = 20, 300
BATCH, THREADS = 64, (1, 2, 4, 8)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "roles": {"type": "array", "items": {"enum": ["admin", "author", "reader"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}, "zip": {"pattern": "^\\d{5}$"}},
            "required": ["street", "number"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "email", "roles", "address"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "any JSON object": {"type": "object"},
    "a person": PERSON,
    "a list of persons": {"type": "array", "items": PERSON, "minItems": 4},
    "60 patterns": {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]{3,9}-[0-9]+$"} for i in range(60)},
        "required": [f"p{i}" for i in range(60)],
        "additionalProperties": False,
    },
}
ENDLESS = {"type": "array", "items": PERSON, "minItems": 10_000}
HOST_PARTS: dict[str, tuple[object, str]] = {
    "waiting for the device": (Drawn, "tokens"),
    "advancing grammars": (AnswerGrammar, "append"),
    "computing masks": (Grammars, "fill_masks"),
    "launching draws": (runner, "choose"),
}


def main(
    suite: Annotated[Path | None, typer.Option(help="a folder of the JSON-Schema-Test-Suite, a draft's")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="a tokenizer.json; else one is made")] = None,
) -> None:
    """Which schemas are held, and what a mask costs."""
    with TemporaryDirectory() as folder:
        file = tokenizer or made_tokenizer(Path(folder), VOCABULARY)
        size = Tokenizer.from_file(str(file)).get_vocab_size()
        grammars = Grammars(file, size, (0,))
        if suite is not None:
            print_suite(suite, grammars, LLTokenizer(file.read_text(), n_vocab=size, eos_token=0))
        print_masks(grammars, size)
        print_batches(file, size)


def made_tokenizer(folder: Path, size: int) -> Path:
    """A byte-level tokenizer whose vocabulary is the most frequent words of the installed packages, with their ends."""
    pieces: Counter[str] = Counter()
    for file in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        words = re.findall(r" ?[^\W\d_]+| ?\d{1,3}|\s+| ?[^\w\s]+", file.read_text(errors="ignore"))
        pieces.update(word[:16] for word in words)
        if len(pieces) > 2 * size:
            break
    for word, count in list(pieces.items()):
        for end in range(2, len(word)):
            pieces[word[:end]] += count
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = (spell.pre_tokenize_str(piece)[0][0] for piece, _ in pieces.most_common())
    vocabulary = list(dict.fromkeys(["<|endoftext|>", *letters, *spelled]))[:size]
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(vocabulary)}, []))
    made.add_special_tokens(["<|endoftext|>"])
    made.pre_tokenizer, made.decoder = spell, decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


# ---------------------------------------------------------------- the suite


def print_suite(suite: Path, grammars: Grammars, tokenizer: LLTokenizer) -> None:
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    accepted_wrongly: list[str] = []
    rejected_wrongly: Counter[str] = Counter()
    for file in sorted(suite.glob("*.json")):
        for case in json.loads(file.read_text()):
            try:
                text = json_grammar(case["schema"])
                check_grammar(text)
            except GrammarError as error:
                counts["refused"] += 1
                refused.update(_reasons(str(error)))
                continue
            counts["compiled"] += 1
            for test in case["tests"]:
                follows = [follows_grammar(grammars, text, each, tokenizer) for each in written(test["data"])]
                counts["documents"] += 1
                if test["valid"] and not all(follows):
                    rejected_wrongly[file.stem] += 1
                if not test["valid"] and any(follows):
                    accepted_wrongly.append(f"{file.stem}: {case['description']}: {test['description']}")
    print(
        f"{counts['compiled']} schemas compiled, {counts['refused']} refused, {counts['documents']} documents: ", end=""
    )
    print(f"{len(accepted_wrongly)} wrongly accepted, {rejected_wrongly.total()} wrongly rejected\n")
    for each in accepted_wrongly:
        print(f"wrongly accepted: {each}")
    print(table_header("refused because", "schemas"))
    for reason, count in refused.most_common():
        print(table_row(reason.replace("|", "/"), count))
    print()
    print(table_header("wrongly rejected in", "documents"))
    for name, count in rejected_wrongly.most_common(12):
        print(table_row(name, count))
    print(flush=True)


def _reasons(error: str) -> list[str]:
    """The keywords that llguidance names, or else its words without what is the schema's own."""
    if error.startswith("Unimplemented keys: "):
        names: list[str] = json.loads(error.removeprefix("Unimplemented keys: "))
        return names
    return [re.sub(r"'.*?'|/.*?/|: .*|\d+", "...", error)[:60]]


def written(document: object) -> Iterator[str]:
    """The document without spaces, and as `json.dumps` writes it."""
    yield json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    yield json.dumps(document)


def follows_grammar(grammars: Grammars, text: str, document: str, tokenizer: LLTokenizer) -> bool:
    ids = tokenizer.tokenize_str(document)
    matcher = grammars.answer(text).matcher
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


# ---------------------------------------------------------------- masks


def print_masks(grammars: Grammars, size: int) -> None:
    """Random answers: any allowed token with the same chance, but JSON's own signs ten times as often."""
    print(table_header("schema", "compiled, ms", "masks", "p50, us", "p99, us", "max, us", "a token's, us"))
    grammars.answer(json_grammar({"type": "null"}))  # loads the tokenizer
    for name, schema in SCHEMAS.items():
        text, draw = json_grammar(schema), random.Random(1)
        began_s = time.thread_time()
        grammars.answer(text)
        compiled_s = time.thread_time() - began_s
        masks_s: list[float] = []
        appends_s: list[float] = []
        for _ in range(ANSWERS):
            answer = grammars.answer(text)
            for _ in range(MOST_TOKENS):
                began_s = time.thread_time()
                mask = np.frombuffer(answer.matcher.compute_bitmask(), np.uint8)
                masks_s.append(time.thread_time() - began_s)
                token = drawn_token(mask, size, draw)
                began_s = time.thread_time()
                answer.append([token])
                appends_s.append(time.thread_time() - began_s)
                if answer.is_complete:
                    break
        p50, p99 = np.percentile(masks_s, [50, 99]) * 1e6
        cells = (f"{1e3 * compiled_s:.1f}", len(masks_s), f"{p50:.0f}", f"{p99:.0f}", f"{1e6 * max(masks_s):.0f}")
        print(table_row(name, *cells, f"{1e6 * statistics.median(appends_s):.0f}"), flush=True)


def drawn_token(mask: NDArray[Any], size: int, draw: random.Random) -> int:
    """An allowed token of `print_masks`."""
    allowed = np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size])[0]
    signs = allowed[allowed < 257]
    return int(draw.choice(signs if len(signs) and draw.random() < 0.5 else allowed))


def print_batches(file: Path, size: int) -> None:
    """Steps of random answers by one grammar."""
    print()
    print(table_header(f"threads for {BATCH} masks", "p50, ms", "p90, ms"))
    for num_threads in THREADS:
        grammars, draw = Grammars(file, size, (0,), num_threads), random.Random(1)
        answers = [grammars.answer(json_grammar(ENDLESS)) for _ in range(BATCH)]
        masks = np.zeros((BATCH, -(-size // 32)), np.int32)
        steps_s: list[float] = []
        for _ in range(MOST_TOKENS):
            began_s = time.perf_counter()
            grammars.fill_masks(answers, [()] * BATCH, [()] * BATCH, masks)
            steps_s.append(time.perf_counter() - began_s)
            for answer, mask in zip(answers, masks, strict=True):
                answer.append([drawn_token(mask, size, draw)])
        p50, p90 = np.percentile(steps_s, [50, 90]) * 1e3
        print(table_row(num_threads, f"{p50:.2f}", f"{p90:.2f}"), flush=True)


# ---------------------------------------------------------------- decoding


def decode(
    device: str = "cpu",
    batch: int = 64,
    steps: int = 64,
    rounds: int = 5,
    vocabulary: int = VOCABULARY,
    shape: Annotated[str | None, typer.Option(help=f"of {', '.join(SHAPES)}, instead of the tiny Qwen3.5")] = None,
    cache_gib: float = 1.0,
    overlap: bool = True,
) -> None:
    """Decoding with grammars beside decoding without."""
    use_device(device)
    layers = load_config(TINY_MODELS / "headrace-tiny-qwen3.5") if shape is None else SHAPES[shape]
    model = replace(layers, vocab_size=vocabulary, eos_token_ids=(0,))
    config = EngineConfig(
        device=device,
        overlap=overlap,
        cache_bytes=int(cache_gib * 2**30),
        max_running=batch,
        max_step_tokens=max(1024, batch),
        max_model_tokens=32 + 4 * steps,
    )
    with TemporaryDirectory() as folder:
        file = made_tokenizer(Path(folder), vocabulary)
        weights = random_model(model, getattr(torch, config.model_dtype), device)
        built = engine_around(weights, config, time.monotonic, file)
        grammar = json_grammar(ENDLESS)
        decode_s(built, batch, steps, grammar)
        found = compare(
            lambda round_: decode_s(built, batch, steps, grammar),
            lambda round_: decode_s(built, batch, steps, None),
            rounds,
        )
        parts = {text: host_parts_s(built, batch, steps, text) for text in (grammar, None)}
    print(f"{batch} answers, a vocabulary of {vocabulary}, {device}: ", end="")
    print(f"a step with grammars {1e3 * found.first_s:.1f} ms, without {1e3 * found.second_s:.1f} ms; ", end="")
    print(f"speed with grammars {found.ratio:.3f} of without\n")
    print(table_header("the host in a step, ms", "with grammars", "without"))
    for name in parts[grammar]:
        print(table_row(name, *(f"{1e3 * parts[text][name]:.2f}" for text in (grammar, None))))


def host_parts_s(built: BuiltEngine, size: int, steps: int, grammar: str | None) -> dict[str, float]:
    """Wall-clock seconds of each of the host's parts in one decode step of the batch."""
    seconds = dict.fromkeys(HOST_PARTS, 0.0)

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - began_s

        return run

    with ExitStack() as patches:
        for name, (owner, attribute) in HOST_PARTS.items():
            patches.enter_context(patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        batch = running_batch(built, size, steps, grammar)
        seconds.update(dict.fromkeys(HOST_PARTS, 0.0))
        batch.step(steps)
        parts = {name: total / steps for name, total in seconds.items()}
    batch.release()
    return parts


def decode_s(built: BuiltEngine, size: int, steps: int, grammar: str | None) -> float:
    """Seconds of one decode step of the batch."""
    batch = running_batch(built, size, steps, grammar)
    began_s = time.perf_counter()
    batch.step(steps)
    seconds = time.perf_counter() - began_s
    batch.release()
    return seconds / steps


def running_batch(built: BuiltEngine, size: int, steps: int, grammar: str | None) -> Batch:
    """A batch all of whose prompts are computed, and which decodes at least `steps` more steps."""
    requests = []
    for prompt in random_prompts(size, 16, seed=1, vocabulary=1000):
        request = greedy(prompt, 4 * steps)
        sampling = replace(request.sampling, grammar=grammar)
        requests.append(replace(request, sampling=sampling))
    batch = Batch(built.engine, requests, 4 * steps)
    while not all(batch.arrivals) or any(sequence.is_prefilling for sequence in batch.sequences):
        batch.step()
    batch.step(4)
    return batch
