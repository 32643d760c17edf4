"""The chat format of the tiny models: `<|role|>text<|end|>` for every message, nothing between messages.

`<|end|>` is the eos token, which the model emits itself. So the assistant's turn in a later prompt is token for
token what was generated, every rendered history is a prefix of the next, and prefix caches hit between turns.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

END = "<|end|>"
PAD = "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (END, PAD, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role ' ~ message['role'] ~ ': use system, user or assistant') -}}"
    "{%- endif -%}"
    "{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


def render_chat(messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    """The text that CHAT_TEMPLATE renders, without Jinja."""
    history = "".join(f"<|{message['role']}|>{message['content']}{END}" for message in messages)
    return history + (ASSISTANT if add_generation_prompt else "")
