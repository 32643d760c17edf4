"""Every field that OpenAI and vLLM define is served, refused or known to change no answer: none is ignored unawares."""

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from router.api.chat_schemas import ChatBody
from router.api.completion_schemas import CompletionBody
from router.api.request_schemas import GenerationBody
from router.api.unsupported_fields import HARMLESS

OPENAI = {
    ChatBody: set(chat_params.CompletionCreateParamsStreaming.__annotations__)
    | set(chat_params.CompletionCreateParamsBase.__annotations__),
    CompletionBody: set(completion_params.CompletionCreateParamsStreaming.__annotations__)
    | set(completion_params.CompletionCreateParamsBase.__annotations__),
}
VLLM_SHARED = """
    use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs
    allowed_token_ids bad_words add_special_tokens response_format structured_outputs guided_json guided_regex
    guided_choice guided_grammar structural_tag guided_decoding_backend guided_whitespace_pattern priority request_id
    logits_processors return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs prompt_embeds
"""
VLLM_CHAT = """
    echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs mm_processor_kwargs
    media_io_kwargs include_reasoning reasoning_effort thinking_token_budget
"""
VLLM = {ChatBody: {*VLLM_SHARED.split(), *VLLM_CHAT.split()}, CompletionBody: set(VLLM_SHARED.split())}


@pytest.mark.parametrize("fields", [OPENAI, VLLM], ids=["openai", "vllm"])
@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_every_field_of_other_servers_is_served_refused_or_known_to_be_harmless(
    body: type[GenerationBody], fields: dict[type[GenerationBody], set[str]]
):
    known = {*body.model_fields, *body.unsupported, *HARMLESS}
    assert fields[body] - known == set()


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_no_field_is_both(body: type[GenerationBody]):
    assert not set(body.model_fields) & set(body.unsupported)
    assert not {*body.model_fields, *body.unsupported} & set(HARMLESS)
