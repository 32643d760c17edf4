"""The grammar of a chat's answers: of the calls that they must be, or of their form after the reasoning."""

from __future__ import annotations

from collections.abc import Callable

from headrace.grammar import GrammarError, check_grammar
from router.api.chat_schemas import ChatBody
from router.api.structured_output import FORM_FIELDS, check_size
from router.errors import bad_request
from router.text.answer.answer_format import REASONING_FORMATS
from router.text.answer.call_grammars import ReasoningPlace, after_reasoning, bounded_reasoning, call_grammar, is_strict
from router.text.literal_tokens import NotLoaded
from router.text.tokens import ModelTokens


def chat_grammar(
    body: ChatBody, tokens: ModelTokens, opens_reasoning: bool, form: Callable[[], str | None]
) -> str | None:
    """The grammar of the answers, None for any text. `form` returns that of the body's form.

    Raises ApiError (400) for tools or schemas that cannot be held, and NotLoaded where compiling would hold others up.
    """
    required, formats = body.required_tools, tokens.formats
    place = None
    if formats.reasoning is not None:
        place = ReasoningPlace(REASONING_FORMATS[formats.reasoning], opens_reasoning, body.thinking_token_budget)
    if body.thinking_token_budget is not None:
        _check_budget(body, tokens, place)
    tools = required
    if not required and not body.has_form and any(map(is_strict, body.offered_tools)):
        tools = body.offered_tools
    if not tools:
        grammar = form()
        if place is None:
            return grammar
        if grammar is None:
            return None if place.max_tokens is None else bounded_reasoning(tokens.marker_ids, place)
        return after_reasoning(grammar, tokens.marker_ids, place)

    field = "tool_choice" if required else "tools"
    if formats.calls is None:
        raise bad_request(f"{field}: the format of this model's calls is not known; set tool_format", field)
    for name in (*(FORM_FIELDS if body.has_form else ()), "allowed_token_ids", "bad_words"):
        if getattr(body, name):
            raise bad_request(f"{name} beside calls that keep to a schema: leave one out", name)
    if tokens.is_for_small_bodies:
        raise NotLoaded
    try:
        grammar = call_grammar(
            formats.calls,
            tools,
            tokens.marker_ids,
            is_required=bool(required),
            max_calls=body.max_calls,
            reasoning=place,
        )
        check_size(grammar)
        check_grammar(grammar)
        return grammar
    except GrammarError as error:
        raise bad_request(f"{field}: {error}", field, "grammar_not_supported") from error


def _check_budget(body: ChatBody, tokens: ModelTokens, place: ReasoningPlace | None) -> None:
    """Raises ApiError (400) where the end of the reasoning cannot be forced, and NotLoaded as `chat_grammar`."""
    field = "thinking_token_budget"
    if tokens.is_for_small_bodies:
        raise NotLoaded
    markers = () if place is None else (place.markers.start, place.markers.end)
    if not markers or not all(marker in tokens.marker_ids for marker in markers):
        message = "this model has no tokens that mark its reasoning; use max_tokens"
        raise bad_request(f"{field}, budget_tokens: {message}", field)
    for name in ("allowed_token_ids", "bad_words"):
        if getattr(body, name):
            raise bad_request(f"{name} beside {field} could leave no token: leave one out", name)
