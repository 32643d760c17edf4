"""Mixtures of experts on one GPU, at the sizes of Qwen3.5-35B-A3B, granite-4.0-h-tiny and Nemotron-3-Nano-30B-A3B.

    python3 -m benchmarks kernels-experts [--only launches ...]

`experts` and `route`: whole operations. `launches`: one layer of a prefill, router to sum, launch by launch as the
profiler saw them; a launch has a floor where it is known what it must do. Experts are chosen by random routers: nearly
evenly.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from benchmarks.shapes import MOE_SHAPES
from benchmarks.timing import Row, kernel_command, measure
from headrace.kernels.dense.linear import LinearWeight
from headrace.kernels.moe.experts import moe_experts
from headrace.kernels.moe.outputs import sum_outputs
from headrace.kernels.moe.routing import moe_route_triton
from headrace.kernels.moe.sigmoid_routing import SigmoidRouting
from headrace.models.config import ModelConfig
from headrace.models.layers.feed_forward import MixtureOfExperts, ReluSquared, SigmoidRouter, SoftmaxRouter, SwiGlu

PROFILED = 3  # layers in a row; the last one's launches count


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@dataclass(frozen=True)
class Mixture:
    """The experts of one layer."""

    name: str
    num_experts: int
    chosen: int
    hidden: int
    inner: int
    shared_inner: int
    has_gate: bool

    @classmethod
    def of(cls, name: str, config: ModelConfig) -> "Mixture":
        moe, has_gate = config.moe, config.activation == "swiglu"
        assert moe is not None
        sizes = moe.intermediate_size, moe.shared_intermediate_size
        return cls(name, moe.num_experts, moe.experts_per_token, config.hidden_size, *sizes, has_gate)

    @property
    def num_matrices(self) -> int:
        """Matrices [inner, hidden] of an expert."""
        return 3 if self.has_gate else 2

    def matrices(self) -> tuple[Tensor, Tensor]:
        up = random(self.num_experts, (self.num_matrices - 1) * self.inner, self.hidden) * self.hidden**-0.5
        return up, random(self.num_experts, self.hidden, self.inner) * self.inner**-0.5

    def rows(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, expert, weight: other experts each time."""
        expert = torch.rand(count, self.num_experts, device="cuda").argsort(-1)[:, : self.chosen].int()
        return random(count, self.hidden), expert, random(count, self.chosen).float()

    def flops(self, count: int) -> float:
        return 2.0 * self.num_matrices * count * self.chosen * self.hidden * self.inner

    def num_bytes(self, count: int) -> float:
        """Weights of the experts that are chosen at all, each once; x, and an output for each choice."""
        share = 1 - (1 - self.chosen / self.num_experts) ** count
        matrix_bytes, values = 2.0 * self.hidden * self.inner, count * self.hidden * (1 + self.chosen)
        return self.num_experts * share * self.num_matrices * matrix_bytes + 2.0 * values

    def layer(self) -> MixtureOfExperts:
        up, down = self.matrices()
        shared_down = LinearWeight(random(self.hidden, self.shared_inner) * self.shared_inner**-0.5)
        matrix = random(self.num_experts, self.hidden) * self.hidden**-0.5
        if self.has_gate:
            shared = SwiGlu(LinearWeight(random(2 * self.shared_inner, self.hidden) * self.hidden**-0.5), shared_down)
            return MixtureOfExperts(SoftmaxRouter(LinearWeight(matrix), self.chosen, True), up, down, shared)
        squared = ReluSquared(LinearWeight(random(self.shared_inner, self.hidden) * self.hidden**-0.5), shared_down)
        bias = torch.zeros(self.num_experts, device="cuda")
        router = SigmoidRouter(matrix.float(), bias, SigmoidRouting(self.chosen, True))
        return MixtureOfExperts(router, up, down, squared)


MIXTURES = tuple(Mixture.of(name, config) for name, config in MOE_SHAPES.items())


def summed_experts(x: Tensor, expert: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return sum_outputs(moe_experts(x, expert, weight, up, down))


def expert_rows() -> Iterator[Row]:
    for mixture in MIXTURES:
        matrices = mixture.matrices()
        for count in (1, 16, 64, 256, 8192):

            def prepare(
                mixture: Mixture = mixture, matrices: tuple[Tensor, Tensor] = matrices, count: int = count
            ) -> Callable[[], object]:
                return partial(summed_experts, *mixture.rows(count), *matrices)

            shape = f"{mixture.name}, {count} rows"
            yield measure("experts", shape, prepare, mixture.num_bytes(count), mixture.flops(count))


def route_rows() -> Iterator[Row]:
    for mixture in MIXTURES:
        for count in (1, 64, 256, 8192):

            def prepare(mixture: Mixture = mixture, count: int = count) -> Callable[[], object]:
                logits = torch.randn(count, mixture.num_experts, device="cuda")
                return partial(moe_route_triton, logits, mixture.chosen, True)

            num_bytes = count * (4.0 * mixture.num_experts + 8.0 * mixture.chosen)
            yield measure("route", f"{mixture.name}, {count} rows", prepare, num_bytes)


def launch_rows() -> Iterator[Row]:
    for mixture in MIXTURES:
        layer = mixture.layer()
        for count in (8192, 65536):
            yield from layer_rows(mixture, layer, random(count, mixture.hidden))


def layer_rows(mixture: Mixture, layer: MixtureOfExperts, x: Tensor) -> Iterator[Row]:
    count, shape = len(x), f"{mixture.name}, {len(x):,} rows"
    launches = profiled(lambda: layer(x))
    floors = Floors(mixture, count)
    for name, took_us in launches:
        yield Row(name, shape, took_us, *floors.of(name))
    total_us = sum(took_us for _, took_us in launches)
    shared_flops = 2.0 * mixture.num_matrices * count * mixture.hidden * mixture.shared_inner
    yield Row("**all**", shape, total_us, mixture.num_bytes(count), mixture.flops(count) + shared_flops)


@dataclass(frozen=True)
class Floors:
    """Bytes and FLOPs of a layer's launches, by their kernels' names; none where they are not known."""

    mixture: Mixture
    count: int

    def of(self, name: str) -> tuple[float, float]:
        m, entries = self.mixture, self.count * self.mixture.chosen
        inner_rows = (m.num_matrices - 1) * m.inner
        known = {
            "_route": (self.count * (4.0 * m.num_experts + 8.0 * m.chosen), 0.0),
            "_sort": (8.0 * entries, 0.0),
            "_up": self._product(m.hidden, inner_rows, self.count * m.hidden + entries * m.inner),
            "_down": self._product(m.inner, m.hidden, entries * (m.inner + m.hidden)),
            "_sum": (2.0 * (entries + 2 * self.count) * m.hidden, 0.0),  # an output for each entry, the shared one's
        }
        return next((floor for start, floor in known.items() if start in name), (0.0, 0.0))

    def _product(self, num_in: int, num_out: int, values: int) -> tuple[float, float]:
        """Every expert's matrix once, and 16-bit values that are read or written once."""
        num_bytes = 2.0 * (self.mixture.num_experts * num_in * num_out + values)
        return num_bytes, 2.0 * self.count * self.mixture.chosen * num_in * num_out


def profiled(work: Callable[[], object]) -> list[tuple[str, float]]:
    """Kernels of one run of `work` and their microseconds, in their order."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as run:
        for _ in range(PROFILED):
            work()
        torch.cuda.synchronize()
    events = [event for event in run.events() if "cuda" in str(event.device_type).lower()]
    events.sort(key=lambda event: event.time_range.start)
    last = events[len(events) // PROFILED * (PROFILED - 1) :]
    return [(event.name[:60].replace("|", "/"), event.time_range.elapsed_us()) for event in last]


main = kernel_command(
    {"experts": expert_rows, "route": route_rows, "launches": launch_rows}, "Experts and their layer's launches."
)
