"""Special tokens in what clients write are text: hidden from the chat template, and encoded as ordinary characters."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from tokenizers import Tokenizer

from router.errors import RouterError, bad_request

T = TypeVar("T")


class NotLoaded(RouterError):
    """The second tokenizer is needed, and this process does not load it."""


class LiteralTokens:
    """Encodes chats in which clients wrote special tokens.

    It holds a second tokenizer, loaded when first needed: the same one, except that its special tokens have secret
    names. A template's special tokens are renamed in the rendered text; a client's keep their spelling, which means
    nothing to the second tokenizer. So both are encoded in one go, by the same rules as any other text.
    `is_loadable` is False in a process that must not wait for it: it raises NotLoaded.
    """

    def __init__(self, tokenizer: Tokenizer, *, is_loadable: bool = True) -> None:
        self._original = tokenizer
        self._is_loadable = is_loadable
        added = tokenizer.get_added_tokens_decoder().values()
        # The longest first: that is what the tokenizer recognises where several begin.
        specials = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        secret = secrets.token_hex(8)
        self._secret_names = {special: f"special{secret}n{number}e" for number, special in enumerate(specials)}

    def hide(self) -> HiddenTokens:
        """A fresh place for the special tokens that one chat's client wrote."""
        if not self._is_loadable and "_renamed" not in self.__dict__:
            return HiddenTokens(self._pattern, is_allowed=False)
        return HiddenTokens(self._pattern)

    def encode(self, rendered: str, hidden: HiddenTokens) -> list[int]:
        """Token ids of a chat rendered from hidden messages: only the template's special tokens count."""
        renamed = self._pattern.sub(lambda found: self._secret_names[found[0]], rendered)
        (encoding,) = self._renamed.encode_batch_fast([hidden.restore(renamed)], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def _renamed(self) -> Tokenizer:
        document = json.loads(self._original.to_str())
        names, model = self._secret_names, document["model"]
        for token in document["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        # Where the model's own vocabulary has a special token, it could find it in a text, too.
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
        elif isinstance(vocabulary, list):
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        document["post_processor"] = None  # it adds special tokens by name; a chat's are the template's
        return Tokenizer.from_str(json.dumps(document))


class HiddenTokens:
    """The special tokens in one client's strings, each replaced by digits that only this chat uses.

    Digits survive what templates do to strings: trimming, JSON, change of case.
    """

    def __init__(self, pattern: re.Pattern[str], *, is_allowed: bool = True) -> None:
        self._pattern = pattern
        self._is_allowed = is_allowed
        self._originals: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._originals)

    @cached_property
    def _nonce(self) -> str:
        return str(10**29 + secrets.randbelow(9 * 10**29))

    def hide(self, value: T) -> T:
        """The same strings, lists and mappings without special tokens; the value itself if there are none."""
        if isinstance(value, str):
            return self._pattern.sub(self._replace, value)  # type: ignore[return-value]
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(each) for key, each in value.items()}  # type: ignore[return-value]
        if isinstance(value, Sequence):
            return [self.hide(each) for each in value]  # type: ignore[return-value]
        return value

    def _replace(self, found: re.Match[str]) -> str:
        if not self._is_allowed:
            raise NotLoaded
        self._originals.append(found[0])
        return f"{self._nonce}{len(self._originals) - 1:09d}"

    def restore(self, text: str) -> str:
        """The text with the special tokens as they were written; raises ApiError (400) if the template cut one."""
        if not self._originals:
            return text
        restored = re.sub(self._nonce + r"(\d{9})", lambda found: self._originals[int(found[1])], text)
        if self._nonce[:10] in restored:
            raise bad_request(
                "the chat template cuts a special token of the model that the messages contain", "messages"
            )
        return restored
