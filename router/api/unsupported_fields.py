"""Fields of other servers that would change the answer and that Headrace does not have: refused, not ignored.

Sources: OpenAI's chat and completion parameters, vLLM's `ChatCompletionRequest` and `CompletionRequest`, SGLang's
`SamplingParams`, llama.cpp's and Text Generation Inference's extensions. A field that is in no table here is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from router.errors import bad_request

ABSENT: tuple[Any, ...] = (None, [], {})
"""Values that ask for nothing, in any field."""


class Unsupported(NamedTuple):
    """A refused field: how to do without it, and the values that mean its absence, beside `absent`."""

    remedy: str
    harmless: tuple[Any, ...] = ()
    absent: tuple[Any, ...] = ABSENT


_CONSTRAINED = Unsupported("use response_format or structured_outputs")
_LOGITS = Unsupported("a client's programs do not run here; use response_format, structured_outputs or logit_bias")
_TEMPLATE = Unsupported("put what the model's chat template takes into chat_template_kwargs")
_REASONING = Unsupported("reasoning comes as reasoning_content, which you may skip; leave it out")
_SAMPLER = Unsupported("use temperature, top_p, top_k, min_p or the penalties")
_TEXT_ONLY = Unsupported("this server answers with text alone; leave it out")

_SHARED: dict[str, Unsupported] = {
    **dict.fromkeys(
        (
            "guided_decoding_backend", "guided_whitespace_pattern", "structural_tag", "json_schema", "regex", "ebnf",
            "grammar",
        ),
        _CONSTRAINED,
    ),
    **dict.fromkeys(("logits_processors", "custom_logit_processor"), _LOGITS),
    **dict.fromkeys(("mirostat", "top_a", "dry_multiplier", "xtc_probability"), _SAMPLER._replace(harmless=(0,))),
    **dict.fromkeys(("typical_p", "tfs_z", "length_penalty"), _SAMPLER._replace(harmless=(1,))),
    "use_beam_search": _SAMPLER._replace(harmless=(False,)),
    "no_stop_trim": Unsupported("use include_stop_str_in_output", (False,)),
    "stop_regex": Unsupported("use stop, with the strings themselves"),
    "logprob_token_ids": Unsupported("use the most likely tokens: top_logprobs of a chat, logprobs of a completion"),
    "return_tokens_as_token_ids": Unsupported("use return_token_ids", (False,)),
    "vllm_xargs": Unsupported("this server has no such extensions; leave it out"),
    "repetition_detection": Unsupported("use repetition_penalty, or leave it out"),
    "cache_salt": Unsupported("use headrace.salt"),
    "lora_path": Unsupported("this server has no adapters; leave it out"),
    "return_hidden_states": Unsupported("hidden states do not leave the nodes; leave it out", (False,)),
    "input_ids": Unsupported("use prompt of /v1/completions, which takes token ids"),
    "input_embeds": Unsupported("use prompt, as text or token ids"),
    "prompt_embeds": Unsupported("use prompt, as text or token ids"),
}  # fmt: skip

HARMLESS: dict[str, str] = {
    **dict.fromkeys(("user", "metadata", "safety_identifier"), "names the asker"),
    **dict.fromkeys(("store", "service_tier"), "chooses what this server has one of"),
    **dict.fromkeys(("prompt_cache_retention", "prompt_cache_options"), "every prefix is cached"),
    "prediction": "would make an answer faster, not another one",
    "priority": "vLLM's; headrace.priority is this server's",
    "request_id": "the header x-request-id is this server's",
    "kv_transfer_params": "the router chooses the nodes",
    "data_parallel_rank": "the router chooses the nodes",
    "spaces_between_special_tokens": "for tokenizers that this server does not load",
}
"""Known fields that are ignored, since they change no answer, and why."""

FOR_CHATS: dict[str, Unsupported] = {
    **_SHARED,
    "functions": Unsupported("use tools"),
    "function_call": Unsupported("use tools and tool_choice", ("none",)),
    "audio": _TEXT_ONLY,
    "modalities": _TEXT_ONLY._replace(harmless=(["text"],)),
    "web_search_options": Unsupported(
        "this server searches nothing; put what it should know into the messages", absent=(None, [])
    ),
    "best_of": Unsupported("use n, and choose among the answers", (1,)),
    "moderation": Unsupported("this server judges no content; leave it out"),
    "verbosity": Unsupported("ask for it in the messages", ("medium",)),
    **dict.fromkeys(("enable_thinking", "thinking", "reasoning"), _TEMPLATE),
    **dict.fromkeys(("include_reasoning", "separate_reasoning"), _REASONING._replace(harmless=(True,))),
    "echo": Unsupported("render the chat yourself and use /v1/completions", (False,)),
    "add_special_tokens": Unsupported("the chat template writes the special tokens; leave it out", (False,)),
    "mm_processor_kwargs": _TEXT_ONLY,
    "media_io_kwargs": _TEXT_ONLY,
}

FOR_COMPLETIONS: dict[str, Unsupported] = {**_SHARED}


def refuse_unsupported(given: Mapping[str, Any] | None, unsupported: Mapping[str, Unsupported]) -> None:
    """Raises ApiError (400) for the first field of `given` that is in `unsupported` and asks for something."""
    for name, value in (given or {}).items():
        if (field := unsupported.get(name)) and not _is_among(value, (*field.absent, *field.harmless)):
            raise bad_request(f"{name} {value!r:.100} is not supported: {field.remedy}", name)


def _is_among(value: Any, values: Sequence[Any]) -> bool:
    """True if JSON has the value among these: there false is not 0, nor true 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def schema_of(unsupported: Mapping[str, Unsupported]) -> dict[str, Any]:
    """The JSON schema's `properties` of unsupported fields: each admits the values that ask for nothing."""
    return {
        name: {
            "enum": [*field.absent, *field.harmless],
            "default": None,
            "title": name.replace("_", " ").capitalize(),
            "description": f"Not supported: {field.remedy}.",
        }
        for name, field in sorted(unsupported.items())
    }
