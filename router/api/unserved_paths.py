"""OpenAI's endpoints and transports that this server does not have: what its refusals say, and what to use."""

from __future__ import annotations

NO_WEBSOCKETS = "this server opens no WebSockets; POST to /v1/responses with stream: true"
NO_SUCH_PATH = "no such path; /docs lists them, and OpenAI's clients take http://HOST:PORT/v1 as base_url"
_TEXT_ONLY = "the served model reads and writes text only"
_UNSERVED = {
    "/v1/embeddings": "this server generates text and computes no embeddings; use another server for them",
    "/v1/rerank": "this server generates text and ranks nothing; use another server for that",
    "/v1/moderations": "this server judges no content; leave it out",
    "/v1/images": f"{_TEXT_ONLY}, no images",
    "/v1/audio": f"{_TEXT_ONLY}, no audio",
    "/v1/files": "this server keeps no files; put their text into the messages",
    "/v1/batches": "this server keeps no batches; send the requests, it queues them",
    "/v1/fine_tuning": "this server trains no models",
    "/v1/responses/compact": "this server compacts no conversations; send a shorter input",
    "/v1/conversations": "this server keeps no conversations; use previous_response_id",
    "/v1/assistants": "this server has no assistants; use /v1/chat/completions",
    "/v1/threads": "this server has no threads; use /v1/chat/completions",
}


def why_unserved(path: str) -> str | None:
    """Says why a path of OpenAI's API is not served; None for any other path."""
    for prefix, why in _UNSERVED.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return why
    return None
