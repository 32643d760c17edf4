"""Broken model folders: each command ends with one line that names the file, what is wrong and the remedy."""

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import node.__main__
import router.__main__
from headrace.command_line import START_FAILED_STATUS

Break = Callable[[Path], object]


@pytest.fixture
def copy_of(load_family, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        folder = shutil.copytree(load_family(name).path, tmp_path / "model")
        capsys.readouterr()  # transformers' progress, where this test is the first to make the checkpoint
        return Path(folder)

    return copy


def with_config(**fields: object) -> Break:
    """Sets fields of config.json; None removes one."""

    def edit(path: Path) -> None:
        config = {**json.loads((path / "config.json").read_text()), **fields}
        (path / "config.json").write_text(json.dumps({name: v for name, v in config.items() if v is not None}))

    return edit


def writing(name: str, content: object) -> Break:
    """Writes a file: bytes as they are, everything else as JSON."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda path: (path / name).write_bytes(data)


def removing(name: str) -> Break:
    return lambda path: (path / name).unlink()


def unreadable(name: str) -> Break:
    """A folder in the file's place: root may read everything else."""

    def replace(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return replace


def with_template(template: object) -> Break:
    def edit(path: Path) -> None:
        (path / "chat_template.jinja").unlink()
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))

    return edit


def truncated(num_bytes: int) -> Break:
    def cut(path: Path) -> None:
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:num_bytes])

    return cut


def with_tensor(name: str, tensor: torch.Tensor) -> Break:
    def edit(path: Path) -> None:
        file = path / "model.safetensors"
        save_file({**load_file(file), name: tensor}, file, metadata={"format": "pt"})

    return edit


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


NODE_CASES: dict[str, tuple[str, Break, str]] = {
    "empty folder": ("granite", emptied, r"/config\.json: No such file or directory; give a model folder"),
    "config is a list": ("granite", writing("config.json", []), r"/config\.json: \[\]: must be a JSON object"),
    "config is no JSON": ("granite", writing("config.json", b"{,"), r"/config\.json: not JSON: Expecting property"),
    "config is no text": ("granite", writing("config.json", b"\xff\xfe"), r"/config\.json: not JSON: 'utf-8' codec"),
    "config nests deeply": ("granite", writing("config.json", b"[" * 100_000), r"/config\.json: not JSON: "),
    "config is a folder": ("granite", unreadable("config.json"), r"/config\.json: Is a directory; give a model folder"),
    "no architecture": ("granite", with_config(architectures=None), r"/config\.json: architectures None: must be"),
    "architecture is text": ("granite", with_config(architectures="X"), r"architectures 'X': must be a list of one"),
    "other architecture": (
        "granite",
        with_config(architectures=["Llama"]),
        r"/config\.json: Llama is not supported; s",
    ),
    "text_config is a list": (
        "qwen35",
        with_config(text_config=[1]),
        r"/config\.json: text_config \[1\]: must be an o",
    ),
    "layers beside layer_types": (
        "granite",
        with_config(num_hidden_layers=40),
        r"/config\.json: num_hidden_layers 40 beside 4 layer_types: they must agree",
    ),
    "layer_types is text": ("qwen35", with_config(layer_types="attention"), r"layer_types 'attention': must be a list"),
    "layer_types holds lists": (
        "qwen35",
        with_config(layer_types=[[]] * 4),
        r"layer_types \[\]: only attention, conv, full",
    ),
    "no attention layer": (
        "granite",
        with_config(layer_types=["mamba"] * 4),
        r"/config\.json: 0 attention and 4 state layers: only hybrids are supported",
    ),
    "negative size": ("granite", with_config(hidden_size=-64), r"hidden_size -64: must be a whole number in 1\.\.16"),
    "huge size": ("granite", with_config(vocab_size=10**12), r"vocab_size 1000000000000: must be a whole number in 1"),
    "size of zero": ("qwen35", with_config(head_dim=0), r"/config\.json: head_dim 0: must be a whole number in 1\.\."),
    "size as text": (
        "qwen35",
        with_config(head_dim="32"),
        r"/config\.json: head_dim '32': must be a whole number in 1",
    ),
    "too many layers": ("qwen35", with_config(num_hidden_layers=10**6), r"num_hidden_layers 1000000: must be a whole"),
    "epsilon of zero": ("qwen35", with_config(rms_norm_eps=0), r"rms_norm_eps 0: must be a finite number above 0"),
    "switch as text": ("granite", with_config(mamba_conv_bias="yes"), r"mamba_conv_bias 'yes': must be true or false"),
    "heads do not divide": (
        "granite",
        with_config(num_attention_heads=5),
        r"hidden_size 64 over num_attention_heads 5",
    ),
    "odd KV heads": ("qwen35", with_config(num_key_value_heads=3), r"4 attention heads over 3 KV heads: must divide"),
    "odd state heads": (
        "qwen35",
        with_config(linear_num_value_heads=5),
        r"5 value heads over 2 key heads: must divide",
    ),
    "odd groups": ("granite", with_config(mamba_n_groups=3), r"8 state heads over 3 groups: must divide evenly"),
    "too many experts a token": ("granite_moe", with_config(num_experts_per_tok=7), r"7 of 6 experts a token: there"),
    "rotation beyond the head": (
        "qwen35",
        with_config(rope_parameters={"partial_rotary_factor": 2}),
        r"2\.0: must be a",
    ),
    "rope_parameters is text": ("qwen35", with_config(rope_parameters="x"), r"rope_parameters 'x': must be an object"),
    "time_step_limit": ("granite", with_config(time_step_limit=[1]), r"time_step_limit \[1\]: must be two numbers"),
    "quantised by config": (
        "qwen35",
        with_config(quantization_config={"quant_method": "fp8"}),
        r"config\.json has a quantization_config, but no weight is FP8: give the weights",
    ),
    "quantised to four bits": (
        "qwen35",
        with_config(quantization_config={"quant_method": "awq", "bits": 4}),
        r"in quant_method 'awq' of 4 bits: only fp8 per tensor",
    ),
    "stop token as text": (
        "granite",
        writing("generation_config.json", {"eos_token_id": "</s>"}),
        r"/generation_config\.json: eos_token_id '</s>': must be a token id or a list",
    ),
    "biased convolution": ("lfm2", with_config(conv_bias=True), r"with conv_bias=True: only False is supported"),
    "attention layers alone": (
        "lfm2",
        with_config(layer_types=["full_attention"] * 4),
        r"4 attention and 0 state layers: only hybrids",
    ),
    "norm before the gate": (
        "falcon_h1",
        with_config(mamba_rms_norm=True, mamba_norm_before_gate=None),
        r"with mamba_norm_before_gate, which is true where the file leaves it out: only false is",
    ),
    "rotary parameters of some layers": (
        "qwen35",
        with_config(rope_parameters={"full_attention": {"rope_type": "yarn", "factor": 4.0}}),
        r"with rope_parameters of their own for 'full_attention': only the same for all layers",
    ),
    "another name for the limit of time steps": (
        "nemotron_h",
        with_config(mamba_dt_limit=[0.001, 0.1]),
        r"with mamba_dt_limit=\[0\.001, 0\.1\]: only None is supported",
    ),
    "experts without a number": ("lfm2_moe", with_config(num_experts=None), r"no 'num_experts', which Lfm2Moe"),
    "too few factors": (
        "falcon_h1",
        with_config(mlp_multipliers=[1.0]),
        r"mlp_multipliers \[1\.0\]: must be a list of 2",
    ),
    "factor of zero": (
        "falcon_h1",
        with_config(ssm_multipliers=[0] * 5),
        r"ssm_multipliers 0: must be a finite number",
    ),
    "state heads beside their sum": (
        "falcon_h1",
        with_config(mamba_d_ssm=100),
        r"mamba_n_heads 6 of 24 values: must be",
    ),
    "no weights": ("granite", removing("model.safetensors"), r"/model: no weights: model\.safetensors missing; give"),
    "truncated weights": (
        "granite",
        truncated(100_000),
        r"/model\.safetensors: .*; is it truncated, or a Git LFS poin",
    ),
    "truncated header": ("granite", truncated(5), r"/model\.safetensors: .*; is it truncated"),
    "Git LFS pointer": (
        "granite",
        writing("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        r"/model\.safetensors: .*Git LFS pointer\? Copy the file again",
    ),
    "huge header": (
        "granite",
        writing("model.safetensors", struct.pack("<Q", 1 << 62) + b"{}"),
        r"/model\.safetensors: .*; is it truncated",
    ),
    "index is a list": ("granite", writing("model.safetensors.index.json", []), r"index\.json: \[\]: must be a JSON o"),
    "index without a map": (
        "granite",
        writing("model.safetensors.index.json", {"weight_map": {"a": 1}}),
        r"/model\.safetensors\.index\.json: weight_map \{'a': 1\}: must name the file of each tensor",
    ),
    "index names a missing file": (
        "granite",
        writing("model.safetensors.index.json", {"weight_map": {"a": "model-1-of-2.safetensors"}}),
        r"/model: no weights: model-1-of-2\.safetensors missing; give a complete",
    ),
    "wrong shape": (
        "granite",
        with_tensor("model.norm.weight", torch.ones(7)),
        r"/model\.safetensors: model\.norm\.weight is \[7\], the config says \[64\]",
    ),
    "wrong dtype": (
        "granite",
        with_tensor("model.norm.weight", torch.ones(64, dtype=torch.int8)),
        r"/model\.safetensors: model\.norm\.weight is int8: only float32, bfloat16, float16 are supported",
    ),
}

NEEDED = {
    "granite": "vocab_size max_position_embeddings hidden_size rms_norm_eps num_hidden_layers num_attention_heads "
    "shared_intermediate_size mamba_n_heads mamba_d_state mamba_n_groups mamba_d_conv",
    "granite_moe": "num_experts_per_tok intermediate_size",
    "lfm2": "vocab_size max_position_embeddings hidden_size norm_eps num_hidden_layers num_attention_heads "
    "conv_L_cache",
    "lfm2_moe": "num_experts_per_tok moe_intermediate_size intermediate_size",
    "falcon_h1": "vocab_size max_position_embeddings hidden_size rms_norm_eps num_hidden_layers num_attention_heads "
    "intermediate_size mamba_n_heads mamba_d_state mamba_n_groups mamba_d_conv",
    "qwen35": "vocab_size max_position_embeddings hidden_size rms_norm_eps num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim linear_num_key_heads linear_num_value_heads linear_key_head_dim "
    "linear_value_head_dim linear_conv_kernel_dim",
    "qwen35_moe": "num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size",
}
NODE_CASES |= {
    f"{family} without {field}": (family, with_config(**{field: None}), rf"/config\.json: no '{field}', which .* needs")
    for family, fields in NEEDED.items()
    for field in fields.split()
}

ROUTER_CASES: dict[str, tuple[Break, str]] = {
    "empty folder": (emptied, r"model_path .*/model: no config\.json there; give a checkpoint's folder"),
    "config is a list": (writing("config.json", []), r"/config\.json: must be a JSON object"),
    "config is no JSON": (writing("config.json", b"{,"), r"/config\.json: not JSON: "),
    "text_config is a list": (with_config(text_config=[1]), r"/config\.json: text_config \[1\]: must be an object"),
    "vocabulary as text": (with_config(vocab_size="big"), r"/config\.json: vocab_size 'big': must be a whole number"),
    "length below one": (with_config(max_position_embeddings=0), r"/config\.json: max_position_embeddings 0: must be"),
    "stop token as text": (
        writing("generation_config.json", {"eos_token_id": ["</s>"]}),
        r"/generation_config\.json: eos_token_id \['</s>'\]: must be a token id or a list of them",
    ),
    "no tokenizer": (removing("tokenizer.json"), r"/tokenizer\.json: missing; a tokenizer\.json must lie beside"),
    "tokenizer is a list": (writing("tokenizer.json", []), r"/tokenizer\.json: must be a JSON object"),
    "tokenizer of another kind": (writing("tokenizer.json", {"a": 1}), r"/tokenizer\.json: no tokenizer that the tok"),
    "template is no text": (
        writing("chat_template.jinja", b"\xff\xfe"),
        r"/chat_template\.jinja: not UTF-8: .*; copy the file again",
    ),
    "template does not compile": (
        writing("chat_template.jinja", b"{% if %}"),
        r"/chat_template\.jinja: the chat template does not compile: ",
    ),
    "template is a number": (
        with_template(1),
        r"/tokenizer_config\.json: chat_template must be text, or a list of named templates",
    ),
}


def ends_with_one_line(status: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert status == START_FAILED_STATUS
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) < 400
    return str(line)


@pytest.mark.parametrize("case", NODE_CASES)
def test_a_node_names_what_is_wrong_with_its_model(case: str, copy_of, capsys: pytest.CaptureFixture[str]):
    family, break_it, message = NODE_CASES[case]
    break_it(path := copy_of(family))
    line = ends_with_one_line(node.__main__.main(["--model", str(path)]), capsys)
    assert line.startswith("n0: ")
    assert re.search(message, line)


def test_random_weights_need_a_sound_config_too(copy_of, capsys: pytest.CaptureFixture[str]):
    family, break_it, message = NODE_CASES["negative size"]
    break_it(path := copy_of(family))
    status = node.__main__.main(["--model", str(path), "--load-format", "dummy"])
    assert re.search(message, ends_with_one_line(status, capsys))


@pytest.mark.parametrize("case", ROUTER_CASES)
def test_a_router_names_what_is_wrong_with_its_model(case: str, copy_of, capsys: pytest.CaptureFixture[str]):
    break_it, message = ROUTER_CASES[case]
    break_it(path := copy_of("granite"))
    status = router.__main__.main(["--model-path", str(path), "--port", "0", "--control-port", "0"])
    line = ends_with_one_line(status, capsys)
    assert line.startswith("router: ")
    assert re.search(message, line)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_device_that_is_not_there_is_named(copy_of, capsys: pytest.CaptureFixture[str]):
    status = node.__main__.main(["--model", str(copy_of("granite")), "--device", "cuda"])
    assert re.search(
        r"node: device cuda: this process sees 0 GPUs; give one of them, or cpu", ends_with_one_line(status, capsys)
    )
