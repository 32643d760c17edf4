"""The `openai` package against a real cluster: the contract that also holds over fake nodes."""

from collections.abc import Iterator

import pytest

from tests.support.cluster.cluster import Cluster
from tests.support.router.openai_contract import OpenAIContract


@pytest.fixture(scope="module")
def openai_url(tiny_checkpoint, tmp_path_factory) -> Iterator[str]:
    with Cluster(tiny_checkpoint("qwen35"), tmp_path_factory.mktemp("openai")) as cluster:
        yield f"{cluster.url}/v1"


class TestOpenAIOverCluster(OpenAIContract):
    pass
