"""Fields of Anthropic's Messages API that Headrace does not have: refused, not ignored.

Source: `anthropic.types.message_create_params` and its beta, anthropic 2.12. `metadata`, `service_tier`, `diagnostics`,
`inference_geo`, `user_profile_id` and `workspace_id` only describe a request: they are ignored.
"""

from __future__ import annotations

from router.api.unsupported_fields import Unsupported

_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

FOR_MESSAGES: dict[str, Unsupported] = {
    "container": Unsupported("this server runs no code; leave it out"),
    "mcp_servers": Unsupported("call MCP tools from the client, and describe them in tools"),
    "context_management": Unsupported("shorten the messages yourself", ({"edits": []}, _KEEP_ALL)),
    "compaction": Unsupported("shorten the messages yourself"),
    "thread": Unsupported("send the whole chat in messages"),
    "fallbacks": Unsupported("one model is served here; leave it out"),
    "chat_template_kwargs": Unsupported("use thinking, or /v1/chat/completions"),
    "output_format": Unsupported("use output_config.format"),
    "speed": Unsupported("there is one speed; leave it out", ("standard",)),
}
