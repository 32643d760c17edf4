"""API keys: hashes in configs and files, and the file's changes."""

import asyncio
import logging
from pathlib import Path

import pytest

from headrace.config import ConfigError, load
from router.config import RouterConfig
from router.keys import ApiKey, KeyRing, KeySource, hash_of, new_key
from tests.support.patience import PATIENCE_S

KEY, OTHER = new_key(), new_key()


def file_with(folder: Path, **keys: str) -> Path:
    file = folder / "keys.yaml"
    lines = [f"  {name}: {{hash: {hash_of(key)}}}\n" for name, key in keys.items()]
    whole = folder / "new"
    whole.write_text("api_keys:\n" + "".join(lines))
    whole.replace(file)
    return file


def test_a_key_is_found_by_its_hash_alone():
    ring = KeyRing({"ann": ApiKey(hash_of(KEY), tenant="acme")})
    assert ring.find(KEY) == ("ann", ApiKey(hash_of(KEY), tenant="acme"))
    for wrong in (OTHER, KEY[:-1], KEY.lower(), "", hash_of(KEY), "\udcff"):
        assert ring.find(wrong) is None


def test_keys_are_random_and_hashes_are_of_the_whole_key():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == len({hash_of(key) for key in keys}) == 100
    assert all(len(key) >= 46 for key in keys)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"ann": {"hash": KEY}}, f"api_keys.ann.hash of {len(KEY)} characters: must be 64 hexadecimal digits"),
        ({"ann": {}}, "api_keys.ann.hash is missing"),
        ({"ann": {"hash": hash_of(KEY), "tenant": "a\0b"}}, "api_keys.ann.tenant 'a\\x00b': at most 64 letters"),
        ({"ann": {"hash": hash_of(KEY), "access": "all"}}, "api_keys.ann.access 'all': must be one of generate"),
        ({"ann": {"hash": hash_of(KEY), "tokens_per_minute": 0}}, "tokens_per_minute 0: must be at least 1"),
        ({"a b": {"hash": hash_of(KEY)}}, "api_keys 'a b': at most 64 letters"),
        ({"ann": {"hash": hash_of(KEY)}, "bob": {"hash": hash_of(KEY).upper()}}, "bob: has the hash of ann"),
    ],
)
def test_bad_keys_are_refused_by_name_and_not_shown(model_folder: Path, keys: object, fault: str):
    with pytest.raises(ConfigError) as refused:
        load(RouterConfig, {"model_path": str(model_folder), "api_keys": keys}, "x.yaml")
    assert fault in str(refused.value)
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("other", [{"client_header": "x-tenant"}, {"priorities": {"ann": 1}}])
def test_a_client_is_its_key_or_what_a_gateway_says(model_folder: Path, other: dict[str, object]):
    with pytest.raises(ConfigError, match="with API keys"):
        RouterConfig(model_folder, api_keys={"ann": ApiKey(hash_of(KEY))}, **other)


def test_a_name_in_config_and_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="api_keys ann: is in the config too"):
        KeySource({"ann": ApiKey(hash_of(OTHER))}, file_with(tmp_path, ann=KEY))


def test_a_file_that_is_missing_is_refused_at_the_start(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        KeySource({}, tmp_path / "none.yaml")


async def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("router.keys.FILE_CHECK_S", 0.005)
    file = file_with(tmp_path, ann=KEY)
    source = KeySource({"ops": ApiKey(hash_of(OTHER))}, file)
    changes: asyncio.Queue[set[str]] = asyncio.Queue()
    watching = asyncio.create_task(source.watch(lambda keys: changes.put_nowait(set(keys))))
    async with asyncio.timeout(PATIENCE_S):
        file_with(tmp_path, ann=KEY, bob=new_key())
        assert await changes.get() == {"ann", "bob", "ops"}
        with caplog.at_level(logging.ERROR):
            file.write_text("api_keys: [")
            while not caplog.records:
                await asyncio.sleep(0.001)
        assert "the API keys stay as they were" in caplog.text and set(source.keys) == {"ann", "bob", "ops"}
        file_with(tmp_path)
        assert await changes.get() == {"ops"}
    watching.cancel()
