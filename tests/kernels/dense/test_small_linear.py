"""Products of few rows against float64, on a GPU or in the interpreter; and as an H200 gets them."""

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.dense import products
from benchmarks.shapes import SHAPES
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.dense.rms_norm import rms_norm
from headrace.kernels.dense.small_linear import Tile, small_linear_triton, tile_for
from headrace.kernels.dense.swiglu import swiglu_torch
from headrace.kernels.lib.sizes import cdiv
from tests.kernels.dense.fp8_matrices import random_matrix
from tests.support.kernels.compiled import SHARED_BYTES_A_BLOCK, compile_for_h200
from tests.support.kernels.launches import product_launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: too large for the interpreter, or its own")
FORMS = ["plain", "gated", "parts"]
SMALL = Tile(64, 64, 1, 4, 2)
ROWS = [1, 2, 15, 16, 17, 63, 64]


def operands(M: int, O: int, I: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:  # noqa: E741
    """x as the engine passes it, columns of a wider tensor that is NaN around them; the weight."""
    wide = torch.full((M, I + 24), NAN, dtype=dtype, device=DEVICE)
    wide[:, 8 : 8 + I] = torch.randn(M, I, device=DEVICE)
    weight = torch.randn(O, I, device=DEVICE) * I**-0.5
    return wide[:, 8 : 8 + I], weight.to(dtype)


def check(x: Tensor, weight: Tensor, form: str, tile: Tile | None = None) -> None:
    y = small_linear_triton(x, weight, form, tile)
    exact = x.double() @ weight.double().t()
    expected = swiglu_torch(exact) if form == "gated" else exact
    assert y.dtype == (torch.float32 if form == "parts" else x.dtype)
    actual = y.double().sum(0) if form == "parts" else y.double()
    bound = 1e-4 if form == "parts" else 2e-2
    torch.testing.assert_close(actual, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("M", ROWS)
def test_few_rows(M: int, form: str):
    check(*operands(M, 128, 256), form, SMALL._replace(parts=4 if form == "parts" else 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("O", "I"), [(2, 16), (130, 100), (94, 33), (66, 200)])
def test_sizes_that_no_tile_divides(O: int, I: int, form: str):  # noqa: E741
    check(*operands(3, O, I), form, SMALL._replace(parts=2 if form == "parts" else 1))


@pytest.mark.parametrize("columns", [16, 32, 128])
def test_narrow_and_wide_tiles(columns: int):
    check(*operands(17, 256, 128), "gated", SMALL._replace(columns=columns))


def test_a_part_may_be_empty():
    check(*operands(2, 64, 64), "parts", SMALL._replace(parts=4))


@pytest.mark.parametrize("out", [torch.empty(5, 69).bfloat16(), torch.empty(5, 70), torch.empty(70, 5).bfloat16().t()])
def test_rows_do_not_go_where_they_do_not_fit(out: Tensor):
    x, weight = operands(5, 70, 64)
    with pytest.raises(ValueError, match=r"out \(5, "):
        small_linear_triton(x, weight, out=out.to(DEVICE))
    with pytest.raises(ValueError, match=r"out \(5, "):
        LinearWeight(weight)(x, out.to(DEVICE))


def test_float16():
    check(*operands(2, 64, 64, torch.float16), "plain", SMALL)


def test_no_rows():
    assert small_linear_triton(*operands(0, 64, 64)).shape == (0, 64)


def test_what_is_no_small_product_is_refused():
    x, weight = operands(65, 64, 64)
    with pytest.raises(ValueError, match="disagree"):
        small_linear_triton(x, weight)
    with pytest.raises(ValueError, match="16 bits"):
        small_linear_triton(x[:2].float(), weight.float())


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("M", [1, 16, 17, 64])
def test_tiles_of_real_products_fill_the_chip_and_split_evenly(M: int, model: str):
    for product in products(SHAPES[model]):
        tile = tile_for(M, product.O, product.I, product.form == "parts")
        assert tile.parts == 1 or product.form == "parts"
        assert product.I % (tile.parts * tile.depth) == 0, product
        programs = cdiv(product.O, tile.columns) * tile.parts
        if product.form == "parts" and M > 16:
            # As many parts as leave one program a multiprocessor, with all its room for loads in flight: twice as many
            # would be more float32 to write, and spread unevenly (Qwen's 160 programs over 132 multiprocessors).
            assert programs <= 132 < 2 * programs, product
            assert tile.num_stages == 8, product
        else:
            assert programs >= 120, product
            assert programs <= 3 * 132 or product.name == "head", product


@pytest.mark.parametrize("model", SHAPES)
def test_products_in_blocks_are_split_further(model: str):
    for product in products(SHAPES[model]):
        if product.form == "parts":
            tile = tile_for(64, product.O, product.I, can_split=True, fp8_blocks=True)
            assert product.I % (tile.parts * tile.depth) == 0, product
            assert 132 < cdiv(product.O, tile.columns) * tile.parts <= 3 * 132, product


@pytest.mark.parametrize(
    ("O", "I", "parts", "stages"),
    [
        (2560, 9216, 3, 6),
        (2560, 4096, 4, 4),  # two parts would leave 52 multiprocessors idle
        (2048, 8192, 4, 6),
        (16384, 2048, 1, 4),
        (64, 208, 1, 6),
        (4096, 11008, 2, 6),  # 43 steps, which nothing divides
        (2560, 9728, 3, 6),  # 38 steps: two parts are too few, and 19 too many
        (896, 4864, 7, 6),  # nine parts of three steps would leave two empty
    ],
)
def test_deep_products_in_fp8_get_about_a_program_for_each_multiprocessor(O: int, I: int, parts: int, stages: int):  # noqa: E741
    for M in (1, 16):
        tile = tile_for(M, O, I, can_split=True, fp8_blocks=False)
        assert (tile.parts, tile.num_stages) == (parts, stages)


@pytest.mark.slow
@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("grouping", [None, "per channel", "blocks"])
def test_an_h200_gets_matrix_units_and_no_spills(grouping: str | None, model: str):
    fp8 = random_matrix(256, 256, grouping) if grouping else None
    cases = [(product, M) for product in products(SHAPES[model])[: -1 if fp8 else None] for M in (1, 16, 64)]
    launches = [product_launch(product, M, fp8) for product, M in cases]
    for case, launch, report in zip(cases, launches, compile_for_h200(launches), strict=True):
        assert report.stack_bytes == 0, (case, report)
        assert report.shared_bytes <= SHARED_BYTES_A_BLOCK, (case, report)
        product, _ = case
        programs = cdiv(product.O, launch.constexprs["COLUMNS"]) * launch.constexprs["PARTS"]
        resident = 132 * report.resident_warps // launch.num_warps
        assert programs <= resident or product.name == "head", (case, report)
        assert "wgmma.mma_async" in report.ptx or "mma.sync" in report.ptx, case
        assert fp8 is None or launch.constexprs["COLUMNS"] < 64 or "e4m3.e4m3" in report.ptx, case
        # The weight is asked for before the kernels before this one are done, and x after.
        before, _, after = report.ptx.partition("griddepcontrol.wait")
        assert "cp.async.bulk.prefetch.L2" in before and "cp.async.cg" not in before, case
        assert "cp.async.cg.shared.global" in after, case


@needs_gpu
@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("model", SHAPES)
def test_real_products(model: str, M: int):
    for product in products(SHAPES[model]):
        check(*operands(M, product.O, product.I), product.form)


@needs_gpu
def test_a_chain_in_a_graph_replays_on_new_inputs():
    """Overlapped kernels read their predecessors' results in every replay."""
    x, up = operands(16, 4096, 2048)
    x, up, down = x.contiguous(), LinearWeight(up), LinearWeight(operands(1, 2048, 2048)[1])
    norm = torch.ones(2048, device=DEVICE)

    def chain() -> Tensor:
        hidden = x
        for _ in range(20):  # normed, or the values of a chain would leave the range of bfloat16
            hidden = rms_norm(down(up.swiglu(hidden)), norm, 1e-5)
        return hidden

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(5):
        x.copy_(torch.randn_like(x) * 4)
        graph.replay()
        replayed = y.clone()
        torch.cuda.synchronize()
        assert replayed.isfinite().all() and replayed.any()
        assert torch.equal(replayed, chain())
