"""Every setting of a cluster file with its default and its meaning, as a cluster file to be filled in."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from deploy.config import DERIVED, Overrides, cluster_from_options
from headrace.config import dataclass_in, field_descriptions

MODEL = Path(__file__).parent / "demo_model"  # any will do: the loader wants one that is there
FOLDER = "/models/granite-4.0-h-micro"
WIDTH = 120
SAME_AS_PREFILL = ("decode", "both")


def settings_file() -> str:
    """The text of a cluster file that sets nothing but `model`: all else stands there as comments, at its default."""
    config = cluster_from_options(None, Overrides(model=MODEL))
    head = "# All settings of `headrace up -c FILE`, with their defaults. To change one remove its #."
    return "\n".join([head, *_lines(config, ())]) + "\n"


def _lines(config: Any, path: tuple[str, ...]) -> Iterator[str]:
    indent, texts = "  " * len(path), field_descriptions(type(config))
    for field in dataclasses.fields(config):
        name = field.name
        value = getattr(config, name) if field.default != "" else ""  # an empty one is filled in from other settings
        if name in DERIVED.get(path, ()):
            continue
        comment = f"{indent}# "
        yield ""
        yield from textwrap.wrap(texts.get(name, ""), WIDTH, initial_indent=comment, subsequent_indent=comment)
        if name in SAME_AS_PREFILL and not path:
            yield f"{name}:  # the same keys as prefill, each with its own value"
            yield f"  #count: {value.count}"
        elif dataclasses.is_dataclass(value):
            yield f"{indent}{name}:"
            yield from _lines(value, (*path, name))
        elif value is None and (section := dataclass_in(get_type_hints(type(config))[name])) is not None:
            for key, text in field_descriptions(section).items():
                yield from textwrap.wrap(f"  {key}  {text}", WIDTH, initial_indent=comment, subsequent_indent=comment)
            yield f"{indent}#{name}: null"
        elif value == MODEL.resolve():
            yield f"{indent}{name}: {FOLDER}"
        else:
            yield f"{indent}#{name}: {_yaml(value)}"


def _yaml(value: object) -> str:
    plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
