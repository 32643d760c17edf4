"""The keys of a prompt."""

from headrace.cache.hashing import prefix_keys
from headrace.request import Request, Sampling
from router.requests.prompt_keys import LONG_PROMPT_TOKENS, PromptKeys


async def test_keys_are_those_of_the_tokens_so_far_and_hashed_once() -> None:
    keys = PromptKeys()
    for length in (40, LONG_PROMPT_TOKENS + 5):
        request = Request("r", tuple(range(length)), 40, Sampling(max_tokens=9, seed=0), salt=b"tenant")
        first = (await keys.of(request, {16}))[16]
        assert first == prefix_keys(range(length), 16, b"tenant")
        both = await keys.of(request, {16, 32})
        assert both[16] is first
        assert both[32] == prefix_keys(range(length), 32, b"tenant")
