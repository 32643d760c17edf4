"""What `headrace status` says of links."""

from typing import Any

from rich.console import Console

from deploy.show import link_table


def link(to: str, **more: Any) -> dict[str, Any]:
    nothing = {"lanes": [], "round_trip_s": None, "bytes_per_s": None, "warning": None, "error": None}
    return {"from": "p0", "to": to, **nothing, **more}


def test_a_link_tells_its_figures_or_what_is_wrong_with_it() -> None:
    measured = {"lanes": ["cuda_copy/cuda", "tcp/eth0"], "round_trip_s": 1.1e-4, "bytes_per_s": 2.3e9}
    links = [
        link("d0", **measured),
        link("d1", **measured, warning="two GPUs by tcp"),
        link("d2", error="lost: [eof]"),
        link("d3"),
    ]
    console = Console(width=120)
    with console.capture() as said:
        console.print(link_table(links))
    _, good, slow, lost, new = said.get().splitlines()
    assert good.split() == ["p0", "d0", "cuda_copy/cuda,", "tcp/eth0", "2.30", "110", "us"]
    assert slow.rstrip().endswith("two GPUs by tcp")
    assert lost.split() == ["p0", "d2", "lost:", "[eof]"]
    assert new.split() == ["p0", "d3", "not", "measured", "yet"]
