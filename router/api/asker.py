"""Parts of a generation request that who asked decides: the tenant of its cache, its ids and seeds, its session."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from starlette.types import Scope

from router.api.generation import GenerationRequest, seeds_from
from router.api.request_ids import RequestId
from router.api.session_headers import session_of
from router.requests.client import Client


def asked_by(client: Client, request_id: RequestId, scope: Scope, generation: GenerationRequest) -> GenerationRequest:
    """The generation request in the cache of the client's tenant, under this id and in its session.

    Two routers make the same of one body and one given id: the ids of its requests, and their seeds where the client
    gave none. The salt is part of the ids, so that tenants with one id do not meet. A prompt's log-probabilities cannot
    be resumed: they are known to the lost router alone.
    """
    generation_id = f"{generation.id_prefix}{request_id.value}"
    requests = list(generation.requests)
    if request_id.is_given and not generation.is_seeded:
        requests = seeds_from(int.from_bytes(_digest(request_id.value.encode(), 8)), requests)
    for index, request in enumerate(requests):
        salt = client.salt(request.salt)
        tenant = f"-{_digest(salt, 4).hex()}" if salt else ""
        requests[index] = replace(
            request,
            request_id=f"{generation_id}{tenant}-{index}",
            salt=salt,
            is_resumable=request_id.is_given and request.sampling.prompt_logprobs is None,
        )
    session = session_of(scope["headers"], generation.session, client)
    # One replacement for all: each costs a small chat half a percent of its time.
    return replace(generation, id=generation_id, requests=tuple(requests), session=session)


def _digest(data: bytes, size: int) -> bytes:
    return blake2b(data, digest_size=size).digest()
