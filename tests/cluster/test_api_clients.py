"""The `openai` and `anthropic` packages against a real cluster: the contracts that also hold over fake nodes."""

from collections.abc import Iterator

import pytest

from tests.support.cluster.cluster import Cluster
from tests.support.router.anthropic_contract import AnthropicContract
from tests.support.router.openai_contract import OpenAIContract
from tests.support.router.responses_contract import ResponsesContract


@pytest.fixture(scope="module")
def router_url(tiny_checkpoint, tmp_path_factory) -> Iterator[str]:
    with Cluster(tiny_checkpoint("qwen35"), tmp_path_factory.mktemp("clients")) as cluster:
        yield cluster.url


@pytest.fixture(scope="module")
def openai_url(router_url: str) -> str:
    return f"{router_url}/v1"


class TestOpenAIOverCluster(OpenAIContract):
    pass


class TestResponsesOverCluster(ResponsesContract):
    pass


class TestAnthropicOverCluster(AnthropicContract):
    pass
