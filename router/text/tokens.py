"""The tokenizer, chat template and limits of one model folder, read without torch or transformers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace.token_array import TokenArray
from router.errors import ModelFolderError, bad_request
from router.text.answer.answer_format import ModelFormats
from router.text.chat_template import ChatTemplate, ChatTemplateError, Message, load_chat_template
from router.text.chat_turns import turns_for
from router.text.detokenizer import Detokenizer
from router.text.literal_tokens import LiteralTokens, NotLoaded
from router.text.message_ends import Mark, marked_places, message_ends, rendered_into_last
from router.text.model_settings import ModelSettings, read_json
from router.text.token_bytes import TokenBytes

USUAL_BYTES_PER_TOKEN = 4
"""Texts of more bytes for each token that the model holds are counted in slices before they are encoded."""
SLICE_CHARS = 64 << 10
BORDER_BYTES = 1024
"""How far a cut may change the tokens on either side. A cut changes those of one word, and inside an endless word those
that a chain of merges links to it; chains are as short as a vocabulary's words (Berglund and van der Merwe,
"Formalizing BPE Tokenization", 2023). A token is at least a byte, so that a slice loses at most this many tokens at
each end."""


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat.

    `boundaries(marks)` returns the token positions where the first and last messages end, and those of the client's
    marks, in order. It renders the chat a few times more: call it only for a prompt that fits the model.
    opens_reasoning   the answer begins inside the reasoning
    """

    tokens: TokenArray
    boundaries: Callable[..., tuple[int, ...]]
    opens_reasoning: bool


class ModelTokens:
    """Tokenizer, chat template and limits of one model; raises ModelFolderError if the folder lacks them.

    parse_special_tokens  special tokens in a chat's messages and tools count as such, and not as text
    generation_config     defaults of sampling are those of the model's generation_config.json
    loads_literal         loads a second tokenizer when a chat contains special tokens; otherwise raises NotLoaded. What
                          else takes long is not done then, either: see `is_for_small_bodies`
    tool_format           of the model's answers; `auto`: as its chat template says
    reasoning_format      the same
    chat_template         file with a template that takes the place of the model's own
    trust_request_chat_template  chats may bring a template of their own
    """

    def __init__(
        self,
        folder: Path,
        *,
        parse_special_tokens: bool = False,
        generation_config: bool = True,
        loads_literal: bool = True,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
        chat_template: Path | None = None,
        trust_request_chat_template: bool = False,
    ) -> None:
        settings = ModelSettings.read(folder, with_sampling=generation_config)
        self._tokenizer, decoders = _load_tokenizer(folder / "tokenizer.json")
        self._chat = load_chat_template(folder, chat_template)
        self._trusts_templates = trust_request_chat_template
        self.formats = ModelFormats.of(None if self._chat is None else self._chat.source, tool_format, reasoning_format)
        self.vocab_size = settings.vocab_size or self._tokenizer.get_vocab_size()
        self.max_model_tokens = settings.max_model_tokens
        self.eos_ids = settings.eos_ids
        self.sampling_defaults = settings.sampling
        self.is_for_small_bodies = not loads_literal
        self.token_bytes = TokenBytes(self._tokenizer, decoders)
        self._literal = None if parse_special_tokens else LiteralTokens(self._tokenizer, is_loadable=loads_literal)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; raises ApiError (400) for text that UTF-8 cannot hold (lone surrogates)."""
        _num_bytes(text)
        # Unlike `encode`, the batch releases the GIL; the fast one leaves offsets out.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def exceeds(self, text: str, limit: int) -> int | None:
        """A number of tokens above `limit` that the text certainly has, or None if encoding must tell.

        Reads no more of the text than it takes to be certain: 8 MiB of digits would be as many tokens, each of half a
        kilobyte while it is encoded. Raises ApiError (400) as `encode`.
        """
        if _num_bytes(text) <= USUAL_BYTES_PER_TOKEN * limit:
            return None
        count = 0
        for start in range(0, len(text), SLICE_CHARS):
            tokens = self.encode(text[start : start + SLICE_CHARS], add_special_tokens=False)
            count += max(0, len(tokens) - 2 * BORDER_BYTES)
            if count > limit:
                return count
        return None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all these tokens, by default without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, prompt: Sequence[int] = (), shown: Collection[str] = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """An incremental `decode` of the tokens that follow `prompt`; special tokens named in `shown` are part of the
        text."""
        ids = {self._special_ids[name]: name for name in shown if name in self._special_ids}
        return Detokenizer(self._tokenizer, prompt, ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def marker_ids(self) -> Mapping[str, int]:
        """Ids of the tokens that are no text to llguidance, by their spelling: special ones, and added ones in angle
        brackets."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {
            token.content: token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    @cached_property
    def _special_ids(self) -> Mapping[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def chat_template(self, source: str | None = None) -> ChatTemplate:
        """The template of a chat that brings `source`, or none of its own.

        Raises ApiError (400) if the model cannot chat, for a template that does not compile and for any where none is
        trusted; NotLoaded where rendering somebody's program could hold others up.
        """
        if source is None:
            if self._chat is None:
                raise bad_request("this model has no chat template; use /v1/completions")
            return self._chat
        if not self._trusts_templates:
            raise bad_request(
                "chat_template is a program, and requests may bring none here (trust_request_chat_template): leave it "
                "out, or render the chat yourself and use /v1/completions",
                "chat_template",
            )
        if self.is_for_small_bodies:
            raise NotLoaded
        try:
            return ChatTemplate(source, {} if self._chat is None else self._chat.special_tokens)
        except ChatTemplateError as error:
            raise bad_request(str(error), "chat_template") from error

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        template: ChatTemplate | None = None,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continues_final: bool = False,
        check: Callable[[str], None] = lambda text: None,
    ) -> ChatPrompt:
        """The prompt of a chat; raises ApiError (400) if the model cannot chat or its template refuses the messages.

        template                from `chat_template`; None: the model's
        add_generation_prompt   the prompt ends with the beginning of an answer
        continues_final         the prompt ends inside the last message, which the answer goes on with
        check                   sees the rendered text before it is encoded, and may raise
        """
        template = template or self.chat_template()
        if tools and not template.takes_tools:
            raise bad_request("this model's chat template knows no tools; leave them out", "tools")

        messages = turns_for(template, messages)
        hidden = None if self._literal is None else self._literal.hide()
        if hidden is not None:
            messages, tools, variables = hidden.hide(messages), hidden.hide(tools), hidden.hide(variables)
            documents = hidden.hide(documents)

        def render(messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
            return template.render(
                messages,
                tools=tools or None,
                variables=variables,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
            )

        if continues_final:
            rendered = rendered_into_last(partial(render, add_generation_prompt=False), messages)
        else:
            rendered = render(messages, add_generation_prompt=add_generation_prompt)
        _num_bytes(rendered)
        check(rendered)
        # The template writes special tokens itself.
        if self._literal is not None and hidden:
            tokens = TokenArray.of(self._literal.encode(rendered, hidden))
        else:
            tokens = TokenArray.of(self.encode(rendered, add_special_tokens=False))

        def boundaries(marks: Sequence[Mark] = ()) -> tuple[int, ...]:
            render_cut = partial(render, add_generation_prompt=False)
            ended = messages[:-1] if continues_final else messages
            ends = message_ends(render_cut, ended, rendered) if ended else []
            if not hidden:
                places = marked_places(render_cut, messages, rendered, marks)
                return self._token_ends(rendered, tokens, sorted({*ends, *places}))
            if not self.token_bytes.is_byte_level:
                return ()  # the tokenizer's own positions are those of another text
            restored_ends = [len(hidden.restore(rendered[:end])) for end in ends]
            return self._token_ends(hidden.restore(rendered), tokens, restored_ends)

        return ChatPrompt(tokens, boundaries, self.formats.opens_reasoning(rendered, is_inside=continues_final))

    def _token_ends(self, text: str, tokens: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
        """For each of the ascending `ends`, positions in `text`, the last token position that is not behind it."""
        if not self.token_bytes.is_byte_level:
            # Encoding again with offsets takes 1.6 times the time; counting bytes, 0.2 times.
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            return _positions([end for _, end in encoding.offsets], ends)
        byte_ends_of_tokens = list(accumulate(len(self.token_bytes.of(token_id) or b"") for token_id in tokens))
        num_bytes = byte_ends_of_tokens[-1]
        normalized = self._normalize(text)
        if num_bytes != len(normalized.encode()):
            return ()  # the tokenizer adds or drops bytes: positions are unknown
        if normalized == text:
            byte_ends = list(accumulate(len(text[start:end].encode()) for start, end in pairwise([0, *ends])))
        else:
            byte_ends = [len(self._normalize(text[:end]).encode()) for end in ends]
        return _positions(byte_ends_of_tokens, byte_ends)

    def _normalize(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


def _positions(token_ends: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    """Numbers of tokens that end up to each of `ends`, without 0 and repetitions."""
    return tuple(sorted({bisect_right(token_ends, end) for end in ends} - {0}))


def _num_bytes(text: str) -> int:
    """Bytes of the text; raises ApiError (400) for text that UTF-8 cannot hold (lone surrogates)."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise bad_request(f"the text is not valid Unicode: {error.reason} at {error.start}") from error


def _load_tokenizer(file: Path) -> tuple[Tokenizer, frozenset[str]]:
    """The tokenizer, and the types of its decoder as tokenizer.json names them."""
    if not file.is_file():
        raise ModelFolderError(f"{file}: missing; a tokenizer.json must lie beside the weights")
    decoder = read_json(file).get("decoder") or {}
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        raise ModelFolderError(f"{file}: no tokenizer that the tokenizers library can read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, frozenset(part["type"] for part in decoder.get("decoders", [decoder]) if part)
