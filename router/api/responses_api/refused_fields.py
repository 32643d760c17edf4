"""Fields of OpenAI's Responses API that Headrace does not have: refused, not ignored.

Source: `openai.types.responses.response_create_params`, openai 3.52. `service_tier`, `safety_identifier`, `user`,
`prompt_cache_key`, `prompt_cache_options` and `prompt_cache_retention` only describe a request: they are ignored.
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
    "top_logprobs": Unsupported("use logprobs and top_logprobs of /v1/chat/completions", (0,)),
}
