"""The shapes of the transfer benchmark between GPUs."""

from benchmarks.transfer.gpu import MODEL, model_shape


def test_the_models_prompt_is_as_large_as_the_model_makes_it() -> None:
    shape = model_shape(64 << 20)
    assert MODEL == "granite-h-micro"
    assert shape.num_blocks * shape.layout.block_size == 8192
    assert shape.layout.block_bytes == 4 * 2 * 16 * 8 * 64 * 2  # attention layers, K and V, tokens, heads, values, bf16
    assert shape.layout.state_bytes == 36 * 2 * (64 * 64 * 128 + 4352 * 3)
