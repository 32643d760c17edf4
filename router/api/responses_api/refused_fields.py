"""Fields of OpenAI's Responses API that Headrace does not have: refused, not ignored.

Sources: `openai.types.responses.response_create_params`, openai 3.52; vLLM's `ResponsesRequest`. `service_tier`,
`safety_identifier`, `user`, `prompt_cache_key`, `prompt_cache_options` and `prompt_cache_retention` only describe a
request: they are ignored.
"""

from __future__ import annotations

from router.api.unsupported_fields import Unsupported

FOR_RESPONSES: dict[str, Unsupported] = {
    "background": Unsupported("ask with stream, and keep the connection", (False,)),
    "context_management": Unsupported("shorten the input yourself"),
    "conversation": Unsupported("use previous_response_id, or send all items in input"),
    "image": Unsupported("this server answers with text alone; leave it out"),
    "max_tool_calls": Unsupported("the client runs all tools and may stop at any call; leave it out"),
    "moderation": Unsupported("this server judges no content; leave it out"),
    "prompt": Unsupported("no prompts are stored here; use instructions and input"),
    "max_tokens": Unsupported("use max_output_tokens"),
    "response_format": Unsupported("use text.format"),
    **dict.fromkeys(
        (
            "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "repetition_penalty", "logit_bias",
            "bad_words", "structured_outputs", "chat_template", "chat_template_kwargs", "mm_processor_kwargs",
            "vllm_xargs", "previous_input_messages",
        ),
        Unsupported("use /v1/chat/completions, which has it"),
    ),
    "cache_salt": Unsupported("use headrace.salt"),
    **dict.fromkeys(
        ("ignore_eos", "include_stop_str_in_output", "enable_response_messages"),
        Unsupported("use /v1/chat/completions", (False,)),
    ),
    "skip_special_tokens": Unsupported("use /v1/chat/completions", (True,)),
    "top_logprobs": Unsupported("use logprobs and top_logprobs of /v1/chat/completions", (0,)),
}  # fmt: skip
