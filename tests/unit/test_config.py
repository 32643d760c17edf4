"""Every field of every config: what it takes, what it refuses, and that the error names it."""

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from deploy.config import ClusterConfig
from headrace.config import ConfigError, field_descriptions, load

MODEL = str(Path(__file__).parents[2] / "tiny_models" / "headrace-tiny-qwen3.5")
NODE = {"name": "p0", "model_path": MODEL}
REQUIRED: dict[str, dict[str, Any]] = {
    "ClusterConfig": {
        "model": MODEL,
        "router": {"model_path": MODEL},
        "prefill": {"count": 1, "node": NODE},
        "decode": {"count": 1, "node": NODE},
        "both": {"count": 0, "node": NODE},
    },
    "Routers": {"model_path": MODEL, "control_port": 9000, "roles": "fixed"},  # which the planner of roles is for
    "NodeGroup": {"node": NODE, "count": 1},
    "NodeConfig": NODE,
    "ApiKey": {"hash": "0" * 64},
    "TlsConfig": {"ca": "a", "cert": "c", "key": "k"},
    "TracingConfig": {"endpoint": "http://127.0.0.1:4318"},
    "EngineConfig": {"device": "cuda"},  # a CPU has one state_dtype only
}

PORT = ([0, 8000, 65535], [-1, 65536])
COUNT = ([1, 300], [0, -1])
SECONDS = ([0.5, 30], [0, -1.0])
TEXT: tuple[list[Any], list[Any]] = (["text"], [])
NAME = (["text"], [""])

# Field -> values that it takes, and values of the right type that it refuses. Switches have no row: they take both.
TABLE: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    "ClusterConfig": {"model": ([MODEL], ["/none"]), "name": (["a-1_b"], ["", "a/b", "a b"])},
    "RayConfig": {
        "address": TEXT,
        "start_timeout_s": ([0.5, 86399], [0, -1.0, 86400]),
        "join_timeout_s": ([0, 86399], [-1.0, 86400]),
        "stop_timeout_s": ([0.5, 86399], [0, -1.0, 86400]),
    },
    "Placement": {
        "num_cpus": ([0, 0.25, 8], [-1.0]),
        "num_gpus": ([0, 0.5, 4], [-1.0, 1.5]),
        "resources": ([{}, {"fast": 1}], [{"fast": -1}]),
        "strategy": (["pack", "spread"], []),
    },
    "NodeGroup": {"count": ([0, 1, 300], [-1])},
    "Routers": {"count": COUNT},
    "RouterConfig": {
        "model_path": ([MODEL], ["/none"]),
        "roles": (["fixed", "elastic"], []),
        "host": TEXT,
        "port": PORT,
        "control_host": TEXT,
        "control_port": PORT,
        "served_model_name": TEXT,
        "name": (["", "a.b-c_d:8001", "x" * 64], ["a b", "x" * 65, "é"]),
        "policy": (["round_robin", "predicted", "dynamo"], ["robin", ""]),
        "tool_format": (["auto", "none", "qwen3_coder"], ["", "xml"]),
        "reasoning_format": (["auto", "none", "think"], ["", "qwen3"]),
        "generation_config": (["model", "none"], ["auto"]),
        "role_window_s": ([10.0, 60], [0.0, -1.0]),
        "max_concurrent": COUNT,
        "max_concurrent_per_client": COUNT,
        "max_unread_bytes": COUNT,
        "max_queue": ([0, 9], [-1]),
        "on_missed_objectives": (["queue", "refuse"], ["drop"]),
        "api_keys_file": ([MODEL], []),
        "chat_template": ([f"{MODEL}/chat_template.jinja"], [f"{MODEL}/none.jinja"]),
        "priorities": ([{}, {"ops": -5}], [{"ops": 1 << 31}]),
        "request_timeout_s": SECONDS,
        "node_return_timeout_s": SECONDS,
        "stalled_after_s": SECONDS,
        "first_event_timeout_s": SECONDS,
        "landing_timeout_s": SECONDS,
        "max_attempts": COUNT,
        "max_prompt_logprobs": COUNT,
        "max_answer_logprobs": COUNT,
        "heartbeat_s": SECONDS,
        "control_silence_s": ([0.5, 3], [0.4, 0, -1.0]),
        "shutdown_grace_s": SECONDS,
    },
    "ApiKey": {
        "hash": (["0aF" * 21 + "0"], ["", "hr-abc", "0" * 63, "g" * 64]),
        "tenant": (["", "acme.1_a-b", "x" * 64], ["a b", "x" * 65, "a\0b"]),
        "access": (["generate", "view", "operate"], []),
        "priority": ([-(2**31), 0, 2**31 - 1], [2**31]),
        "tokens_per_minute": COUNT,
    },
    "TracingConfig": {
        "endpoint": (["http://127.0.0.1:4318", "https://traces.example"], ["", "127.0.0.1:4318"]),
        "sample": ([0, 0.01, 1], [-0.1, 1.1]),
    },
    "Objectives": {"first_token_s": SECONDS, "token_gap_s": SECONDS},
    "ParseLimits": {
        "parse_processes": COUNT,
        "max_parsing": COUNT,
        "parse_cpu_s": SECONDS,
        "parse_memory_bytes": ([1 << 26, 1 << 34], [0, (1 << 26) - 1]),
    },
    "StoredLimits": {
        "max_stored_responses": ([0, 9], [-1]),
        "max_stored_responses_per_client": COUNT,
        "max_stored_bytes": COUNT,
        "max_stored_bytes_per_client": COUNT,
        "stored_response_s": SECONDS,
    },
    "HttpLimits": {
        "cors_origins": ([(), ("*",), ("https://a.example", "http://b:80")], [["a.example"], ["https://a/b"]]),
        "client_header": (["", "x-tenant"], ["x tenant", "x:y"]),
        "max_connections": COUNT,
        "max_connections_per_client": COUNT,
        "max_header_bytes": ([1024, 1 << 20], [1023, 0]),
        "header_timeout_s": SECONDS,
        "idle_timeout_s": SECONDS,
        "max_body_bytes": COUNT,
        "max_bodies_bytes": ([1 << 25, 1 << 30], [0, (1 << 25) - 1]),
        "max_bodies_bytes_per_client": ([1 << 25, 1 << 30], [0, (1 << 25) - 1]),
        "body_timeout_s": SECONDS,
        "unread_timeout_s": SECONDS,
    },
    "RuntimeConfig": {
        "name": NAME,
        "model_path": TEXT,
        "router_addresses": (
            [(), ("10.0.0.1:8001",), ("a:1", "b:1")],
            [["a"], ["a:"], [":1"], ["a:0"], ["a:65536"], ["a:1", "a:1"]],
        ),
        "host": TEXT,
        "port": PORT,
        "staging_buffers": COUNT,
        "max_message_bytes": COUNT,
        "state_wire_dtype": (["float32", "bfloat16", "float16", "int8", "fp8"], ["int4"]),
        "admission_timeout_s": SECONDS,
        "control_silence_s": ([0.5, 3], [0.4, 0, -1.0]),
        "watchdog_s": ([3, 60.0], [2.9, 0]),
        "shutdown_grace_s": ([0, 2.0], [-1.0]),
    },
    "NodeConfig": {"role": (["prefill", "decode", "both"], [])},
    "DecodeConfig": {"reservation_timeout_s": SECONDS, "orphan_timeout_s": SECONDS, "max_unsent_tokens": COUNT},
    "LocalPrefillConfig": {"max_tokens": ([0, 64], [-1]), "max_share": ([0.5, 1], [0, 1.1])},
    "FetchConfig": {
        "min_tokens": COUNT,
        "max_time_ratio": SECONDS,
        "timeout_s": SECONDS,
    },
    "EngineConfig": {
        "device": (["cuda", "cuda:1"], ["", "gpu", "cuda0", "cuda:x"]),
        "dtype": (["float32", "bfloat16"], ["int8"]),
        "state_dtype": (["float32", "bfloat16"], ["float16"]),
        "checkpoint_dtype": (["bfloat16", "float16", "int8", "fp8"], ["float32", "int4"]),
        "load_format": (["safetensors", "dummy"], ["pickle"]),
        "quantization": (["fp8"], ["int4", ""]),
        "threads": COUNT,
        "block_size": COUNT,
        "cache_bytes": COUNT,
        "state_share": ([0.01, 0.99], [0, 1, -0.5]),
        "checkpoint_policy": (["none", "align", "every", "branch"], ["brunch"]),
        "checkpoint_grid_tokens": COUNT,
        "eviction_policy": (["lru", "flop_aware", "reuse_aware"], ["fifo"]),
        "max_step_tokens": ([64, 4096], [0, -1]),
        "max_running": ([1, 64], [0, -1]),
        "max_model_tokens": COUNT,
    },
    "SpeculationConfig": {
        "drafter": (["none", "grammar", "ngram", "suffix", "mtp"], ["", "eagle"]),
        "count": (["auto", "fixed"], ["", "off"]),
        "max_drafts": COUNT,
        "answer_bytes": ([300, 1 << 30], [0, 299]),
        "draft_vocabulary": ([0, 1, 1 << 16], [-1]),
    },
    "UcxConfig": {
        "host": TEXT,
        "port": PORT,
        "transports": NAME,
        "net_devices": TEXT,
        "tcp_segment": TEXT,
        "silence_s": ([0.5, 3], [0.4, 0, -1.0]),
        "cuda_transports": TEXT,
        "cuda_poll_s": ([0, 0.1], [-0.1]),
    },
    "TlsConfig": {"ca": NAME, "cert": NAME, "key": NAME, "server_name": TEXT},
}

WRONG_TYPES: dict[Any, list[Any]] = {
    bool: ["maybe", "", 2, -1, 0.5, math.nan, []],
    int: ["abc", "1x", "", "1.5", 1.5, math.nan, math.inf, "nan", True, False, [1], {}],
    float: ["abc", "1x", "", math.nan, math.inf, -math.inf, "nan", "inf", True, False, [1], {}],
    tuple: ["a:1", 5, True, [5], {"a": "b"}],
    str: [5, 1.5, True, ["a"], {}],
    Path: [5, True, ["a"], {}, "a\0b", "a" * 256, "a/" * 3000],
    Literal: ["heap", 5, True, []],
    Mapping: [5, ["a"], {"a": "x"}, {"a": math.nan}, {"a": True}, "a"],
}
SWITCH_WORDS = {
    True: [True, 1, "true", "True", "TRUE", "yes", "Yes", "on", "ON", "1", "y", "t"],
    False: [False, 0, "false", "False", "FALSE", "no", "No", "off", "OFF", "0", "n", "f"],
}


def config_types(kind: type) -> Iterator[type]:
    """A config's dataclass and those of its sections, however deep."""
    yield kind
    for section in sections(kind).values():
        yield from config_types(section)


def sections(kind: type) -> dict[str, type]:
    hints = typing.get_type_hints(kind).items()
    parts = [(name, part) for name, hint in hints for part in (hint, *typing.get_args(hint))]
    return {name: part for name, part in parts if dataclasses.is_dataclass(part)}


def type_of(kind: type, name: str) -> tuple[Any, bool]:
    """A field's type without None, and whether it may be None."""
    hint = typing.get_type_hints(kind)[name]
    if type(None) in typing.get_args(hint):
        (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
        return inner, True
    return typing.get_origin(hint) or hint, False


def row(kind: type, name: str) -> tuple[list[Any], list[Any]]:
    """The field's row in the table; it stands under the class that declares the field."""
    (owner,) = (base for base in kind.__mro__ if name in TABLE.get(base.__name__, {}))
    return TABLE[owner.__name__][name]


KINDS = {kind.__name__: kind for kind in config_types(ClusterConfig)}
VALUES = [
    (kind, field.name)
    for kind in KINDS.values()
    for field in dataclasses.fields(kind)
    if field.name not in sections(kind) and type_of(kind, field.name)[0] is not bool
]
SWITCHES = [
    (kind, field.name)
    for kind in KINDS.values()
    for field in dataclasses.fields(kind)
    if type_of(kind, field.name)[0] is bool
]
SECTIONS = [(kind, name) for kind in KINDS.values() for name in sections(kind)]


def named(case: Any) -> str:
    return case.__name__ if isinstance(case, type) else str(case)


def with_field(kind: type, name: str, value: object) -> Any:
    return load(kind, {**REQUIRED.get(kind.__name__, {}), name: value}, "c.yaml")


def assert_refused(kind: type, name: str, value: object) -> None:
    with pytest.raises(ConfigError) as failure:
        with_field(kind, name, value)
    assert str(failure.value).startswith(f"c.yaml: {name} "), (value, failure.value)
    assert len(str(failure.value).partition(": ")[2].partition(": ")[2]) > 5, "no remedy"


def test_the_table_holds_every_field_and_no_other() -> None:
    declared = {
        (base.__name__, name)
        for kind in KINDS.values()
        for base in kind.__mro__
        for name in vars(base).get("__annotations__", {})
        if dataclasses.is_dataclass(base) and (kind, name) in VALUES
    }
    assert declared == {(kind, name) for kind, rows in TABLE.items() for name in rows}


@pytest.mark.parametrize("kind", KINDS.values(), ids=named)
def test_every_field_is_described(kind: type) -> None:
    assert set(field_descriptions(kind)) == {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(("kind", "name"), VALUES, ids=named)
def test_good_values_are_taken(kind: type, name: str) -> None:
    wanted, optional = type_of(kind, name)
    for value in row(kind, name)[0]:
        assert getattr(with_field(kind, name, value), name) == (Path(value) if wanted is Path else value)
        if wanted in (int, float):
            assert getattr(with_field(kind, name, str(value)), name) == value
    if optional:
        assert getattr(with_field(kind, name, None), name) is None
    else:
        assert_refused(kind, name, None)


@pytest.mark.parametrize(("kind", "name"), VALUES, ids=named)
def test_values_out_of_range_are_refused(kind: type, name: str) -> None:
    for value in row(kind, name)[1]:
        assert_refused(kind, name, value)


@pytest.mark.parametrize(("kind", "name"), VALUES + SWITCHES, ids=named)
def test_wrong_types_are_refused(kind: type, name: str) -> None:
    for value in WRONG_TYPES[type_of(kind, name)[0]]:
        assert_refused(kind, name, value)


@pytest.mark.parametrize(("kind", "name"), SWITCHES, ids=named)
def test_switches_take_the_usual_words_both_ways(kind: type, name: str) -> None:
    for wanted, words in SWITCH_WORDS.items():
        for word in words:
            assert getattr(with_field(kind, name, word), name) is wanted


@pytest.mark.parametrize(("kind", "name"), SECTIONS, ids=named)
def test_a_section_is_a_mapping_or_empty(kind: type, name: str) -> None:
    for value in (5, "text", [1], True):
        assert_refused(kind, name, value)
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        assert getattr(with_field(kind, name, None), name) == field.default_factory()


@pytest.mark.parametrize("kind", KINDS.values(), ids=named)
def test_an_unknown_key_names_the_nearest_one(kind: type) -> None:
    name = max((field.name for field in dataclasses.fields(kind)), key=len)
    with pytest.raises(ConfigError, match=f"{name[:-1]} is an unknown key: did you mean {name}"):
        with_field(kind, name[:-1], 1)


def test_every_fault_of_a_file_is_reported_at_once_with_its_path() -> None:
    data = {
        "model": MODEL,
        "nmae": "x",
        "name": "a/b",
        "router": {"model_path": MODEL, "port": "abc", "max_queue": -1},
        "prefill": {"node": {**NODE, "engine": {"max_running": 0, "block_size": 0, "threads": "two"}}, "count": -1},
    }
    with pytest.raises(ConfigError) as failure:
        load(ClusterConfig, data, "c.yaml")
    title, *faults = str(failure.value).splitlines()
    assert title == "c.yaml:"
    assert {fault.split()[0] for fault in faults} == {
        "nmae",
        "name",
        "decode",
        "both",
        "router.port",
        "router.max_queue",
        "prefill.count",
        "prefill.node.engine.max_running",
        "prefill.node.engine.block_size",
        "prefill.node.engine.threads",
    }


def test_settings_that_do_not_go_together_are_refused_by_their_names() -> None:
    for engine, fault in (
        ({"max_running": 65, "max_step_tokens": 64}, "max_step_tokens 64 < max_running 65"),
        (
            {"max_running": 64, "max_step_tokens": 65, "speculation": {"drafter": "ngram"}},
            "no row of a step is left for drafts; raise max_step_tokens to 66",
        ),
        ({"device": "cpu", "state_dtype": "bfloat16"}, "state_dtype bfloat16 on cpu"),
    ):
        with pytest.raises(ConfigError, match=fault):
            load(KINDS["EngineConfig"], engine, "c.yaml")
