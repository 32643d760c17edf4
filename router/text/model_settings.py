"""Settings of a model folder that the router needs, checked when they are read: vocabulary, length, stop tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.errors import ModelFolderError


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling of requests that name none: OpenAI's, or those of a model's generation_config.json. `top_k` 0: all."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, file: Path, config: Mapping[str, Any]) -> SamplingDefaults:
        """Defaults in generation_config.json; raises ModelFolderError for one that no request may have."""
        found: dict[str, Any] = {}
        for name, (least, most) in _RANGES.items():
            value = config.get(name)
            if value is None:
                continue
            kinds = (int,) if name == "top_k" else (int, float)
            if type(value) not in kinds or not least <= value <= most:
                raise ModelFolderError(
                    f"{file}: {name} {value!r}: must lie in {least}..{most}; correct it, or set generation_config: none"
                )
            found[name] = max(value, 0) if name == "top_k" else float(value)
        return cls(**found)


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0.000001, 1),
    "top_k": (-1, 2**32 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
}


@dataclass(frozen=True)
class ModelSettings:
    """Fields of config.json and generation_config.json; None or empty: the folder does not say."""

    vocab_size: int | None
    max_model_tokens: int | None
    eos_ids: frozenset[int]
    sampling: SamplingDefaults

    @classmethod
    def read(cls, folder: Path, *, with_sampling: bool) -> ModelSettings:
        """Raises ModelFolderError with the file, the field and its value. `with_sampling`: with its defaults of it."""
        file, generation = folder / "config.json", folder / "generation_config.json"
        config = read_json(file)
        inner = config.get("text_config") or {}
        if not isinstance(inner, dict):
            raise ModelFolderError(f"{file}: text_config {inner!r}: must be an object")
        text_config = {**config, **inner}
        defaults = read_json(generation)
        return cls(
            _size(file, text_config, "vocab_size"),
            _size(file, text_config, "max_position_embeddings"),
            _eos_ids(((generation, defaults), (file, config), (file, text_config))),
            SamplingDefaults.read(generation, defaults) if with_sampling else SamplingDefaults(),
        )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. Raises ModelFolderError."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{file}: not JSON: {error}; copy the file again") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{file}: must be a JSON object; copy the file again")
    return value


def read_text(file: Path) -> str:
    """The text of a file in UTF-8. Raises ModelFolderError."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelFolderError(f"{file}: {error.strerror}; give a model folder that this user can read") from error
    except UnicodeDecodeError as error:
        raise ModelFolderError(f"{file}: not UTF-8: {error}; copy the file again") from error


def _size(file: Path, config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise ModelFolderError(f"{file}: {name} {value!r}: must be a whole number above 0")
    return value


def _eos_ids(configs: Iterable[tuple[Path, Mapping[str, Any]]]) -> frozenset[int]:
    """End-of-sequence ids of the first config that names any."""
    for file, config in configs:
        value = config.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(each) is int for each in ids):
            raise ModelFolderError(f"{file}: eos_token_id {value!r}: must be a token id or a list of them")
        return frozenset(ids)
    return frozenset()
