"""Chat templates, rendered as in Hugging Face's transformers: sandboxed Jinja with the same settings and helpers.

Source: transformers `utils/chat_template_utils.py` (`_compile_jinja_template`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.errors import ModelFolderError, RouterError, bad_request
from router.text.model_settings import read_json, read_text

Message = Mapping[str, Any]
MAX_MESSAGE_CHARS = 1000
"""Longest message of a template in an error: its author may write any."""


class ChatTemplateError(RouterError):
    """A chat template that does not compile."""


class ChatTemplate:
    """A chat template: the model's, the operator's or one that came with a request.

    The sandbox keeps it from files, modules and Python's internals, and from changing what it is given. It bounds
    neither time nor memory: whoever does not trust a template renders it where both are limited.

    source          the template's text; raises ChatTemplateError if it does not compile
    special_tokens  its variables bos_token, eos_token and so on
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # besides Jinja's own, Python's compiler refuses what is nested too deeply
            raise ChatTemplateError(f"the chat template does not compile: {error!s:.{MAX_MESSAGE_CHARS}}") from error
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.takes_tools = "tools" in source
        self.takes_argument_text = re.search(r"arguments\s+is\s+(?:not\s+)?(?:string|mapping)", source) is not None

    def knows(self, name: str) -> bool:
        """True if the template mentions a role or variable."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        documents: Sequence[Any] | None = None,
    ) -> str:
        """The prompt's text; raises ApiError (400) with the template's own message if it refuses the chat."""
        try:
            return self._template.render(
                {
                    **self.special_tokens,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: anything may go wrong in it
            cause = f"{error!s:.{MAX_MESSAGE_CHARS}}"
            raise bad_request(f"the model's chat template refuses the messages: {cause}", "messages") from error


def load_chat_template(folder: Path, instead: Path | None = None) -> ChatTemplate | None:
    """Reads chat_template.jinja or tokenizer_config.json, or the file `instead` of both.

    Returns None if the model has no chat template; raises ModelFolderError for one that cannot be used.
    """
    file = folder / "tokenizer_config.json"
    settings = read_json(file)
    source = settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = [each for each in source if isinstance(each, dict)]
        source = next((each.get("template") for each in named if each.get("name") == "default"), None)
    separate = instead or folder / "chat_template.jinja"
    if instead is not None or separate.is_file():
        file, source = separate, read_text(separate)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelFolderError(f"{file}: chat_template must be text, or a list of named templates")
    try:
        return ChatTemplate(source, _special_tokens(settings))
    except ChatTemplateError as error:
        raise ModelFolderError(f"{file}: {error}") from error


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens of tokenizer_config.json by name; each is a string or an object with `content`."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes of Jinja's own `tojson`, which is for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
