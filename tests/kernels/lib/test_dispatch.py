"""Choice of the Hopper variants: by GPU and dtype, unless the process has switched them off. Nothing is launched."""

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from headrace.kernels.attention.paged_attention import PagedChunks, PagedPrefill, paged_prefill
from headrace.kernels.dense import swiglu_linear_hopper
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.gdn.heads import GdnHeads
from headrace.kernels.gdn.scan import gdn_prefill_triton
from headrace.kernels.gdn.tail_update import GdnTail, gdn_tail_update
from headrace.kernels.lib import dispatch
from headrace.kernels.lib.dispatch import runs_hopper, set_hopper_kernels
from headrace.kernels.lib.segments import PrefillSegments
from headrace.kernels.lib.tails import Tails
from headrace.kernels.moe import grouped_linear_hopper
from headrace.kernels.moe.experts import moe_experts
from headrace.kernels.ssd.heads import SsdHeads
from headrace.kernels.ssd.scan import ssd_prefill_triton
from headrace.kernels.ssd.tail_update import SsdTail, ssd_tail_update

ROWS = 4096
CPU = torch.device("cpu")


def random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def attention() -> None:
    ids = list(range(ROWS // 16))
    pool = random(len(ids), 16, 4, 256)
    batch = PagedPrefill((ROWS,), PagedChunks.build([ROWS], [0], [ids], 16, CPU))
    rows = random(ROWS, 4, 256)
    paged_prefill(random(ROWS, 16, 256), rows, rows, pool, pool, 1.0, batch)


def swiglu() -> None:
    LinearWeight(random(256, 64)).swiglu(random(ROWS, 64))


def some_rows() -> None:
    LinearWeight(random(4096, 64))(random(64, 64))


def swiglu_of_some_rows() -> None:
    LinearWeight(random(4096, 64)).swiglu(random(20, 64))


def few_rows_in_parts() -> None:
    LinearWeight(random(2048, 2048)).parts(random(2, 2048))


def segments() -> PrefillSegments:
    return PrefillSegments.build((ROWS,), (None,), (), CPU)


def ssd() -> None:
    heads = SsdHeads(-torch.rand(8), torch.rand(8), torch.rand(8))
    columns = random(ROWS, 1, 128)
    pool = torch.zeros(2, 8, 64, 128)
    ssd_prefill_triton(random(ROWS, 8, 64), random(ROWS, 8), columns, columns, heads, pool, segments())


def gdn() -> None:
    keys, gates = random(ROWS, 2, 128), random(ROWS, 4)
    heads, pool = GdnHeads(-torch.rand(4), torch.rand(4)), torch.zeros(2, 4, 128, 128)
    gdn_prefill_triton(keys, keys, random(ROWS, 4, 128), gates, gates, heads, pool, segments())


def tails(rows_each: int) -> Tails:
    return Tails(torch.tensor([[0, -1, 0, 0, 3, 0]], dtype=torch.int32), rows_each)


def ssd_decode(rows_each: int = 1) -> None:
    heads, columns = SsdHeads(-torch.rand(8), torch.rand(8), torch.rand(8)), random(rows_each, 1, 128)
    tail = SsdTail(random(1, 32, 8, 64), random(1, 32, 1, 128), torch.rand(1, 32, 8))
    x, dt, pool = random(rows_each, 8, 64), random(rows_each, 8), random(2, 8, 64, 128)
    ssd_tail_update(x, dt, columns, columns, heads, pool, tail, tails(rows_each))


def ssd_check() -> None:
    ssd_decode(rows_each=4)


def gdn_decode(rows_each: int = 1) -> None:
    heads, keys, gates = GdnHeads(-torch.rand(4), torch.rand(4)), random(rows_each, 2, 128), random(rows_each, 4)
    tail = GdnTail(random(1, 32, 2, 128), random(1, 32, 4, 128), -torch.rand(1, 32, 4))
    values, pool = random(rows_each, 4, 128), random(2, 4, 128, 128)
    gdn_tail_update(keys, keys, values, gates, gates, heads, pool, tail, tails(rows_each))


def gdn_check() -> None:
    gdn_decode(rows_each=4)


def experts() -> None:
    expert = torch.randint(4, (ROWS, 2), dtype=torch.int32)
    moe_experts(random(ROWS, 64), expert, torch.ones(ROWS, 2), random(4, 256, 64), random(4, 64, 128))


OPERATIONS: dict[Callable[[], None], str] = {
    attention: "_hopper_prefill_kernel",
    swiglu: "_swiglu_linear_kernel",
    some_rows: "_one_round_kernel",
    swiglu_of_some_rows: "_one_round_kernel",
    few_rows_in_parts: "_one_round_kernel",
    ssd: "_ssd_hopper_outputs_kernel",
    gdn: "_gdn_hopper_states_kernel",
    ssd_decode: "_ssd_tail_hopper_kernel",
    ssd_check: "_ssd_tail_check_kernel",
    gdn_decode: "_gdn_tail_hopper_kernel",
    gdn_check: "_gdn_tail_check_kernel",
    experts: "_grouped_linear_kernel",
}


class Unlaunched:
    """Stands in for a kernel: notes its name where it would be launched."""

    def __init__(self, name: str, launched: list[str]):
        self._name, self._launched = name, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: self._launched.append(self._name)


def hopper_kernels() -> set[str]:
    modules = [module for name, module in sys.modules.items() if name.startswith("headrace.kernels.")]
    return {name for m in modules if m.__name__.endswith("_hopper") for name in vars(m) if name.endswith("_kernel")}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that a Hopper GPU would have been given."""
    names: list[str] = []
    for module in [module for name, module in sys.modules.items() if name.startswith("headrace.kernels.")]:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Unlaunched(name, names))
        if hasattr(module, "runs_triton"):
            monkeypatch.setattr(module, "runs_triton", lambda x: True)
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)
    for module in (
        dispatch,
        grouped_linear_hopper,
        swiglu_linear_hopper,
        sys.modules["headrace.kernels.attention.prefill_hopper"],
    ):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 8)
    yield names
    set_hopper_kernels(True)


def test_each_operation_takes_its_hopper_variant(launched: list[str]):
    for operation in OPERATIONS:
        operation()
    assert hopper_kernels() == set(OPERATIONS.values()) <= set(launched)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_hopper_kernel_is_chosen_when_they_are_switched_off(operation: Callable[[], None], launched: list[str]):
    set_hopper_kernels(False)
    operation()
    assert launched and not hopper_kernels() & set(launched)


def test_only_halves_of_a_hopper_gpu_take_them(monkeypatch: pytest.MonkeyPatch):
    x = random(1)
    assert not runs_hopper(x)
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)
    assert runs_hopper(x) and runs_hopper(x.half())
    assert not runs_hopper(x.float())
