"""What `headrace status` and `headrace explain` print."""

from typing import Any

from rich.console import Console

from deploy.api import ChatAnswer
from deploy.show import candidate_table, decision_lines, link_table, node_table, report_table


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


def test_what_a_router_says_is_no_markup() -> None:
    pool = {"in_use": 1, "cached": 2, "total": 8}
    facts = {"role": "decode", "state": "ready", "address": "[fe80::1]:7000", "pid": 7, "running": 0, "waiting": 0}
    usage = {"prompt_tokens": 9, "completion_tokens": 1}
    report = {"path": "local", "decode": {"node": "d[/x]", "attention_hit_tokens": 0, "state": "computed"}}
    answer = ChatAnswer("", {**usage, "headrace": report}, None, 0.1)
    console = Console(width=160)
    with console.capture() as said:
        console.print(node_table([{"name": "d[/x]", **facts, "blocks": pool, "slots": pool}]))
        console.print(link_table([link("d[/x]", lanes=["tcp[/x]"])]))
        console.print(report_table(answer))
    _, node, _, lane, *lines = said.get().splitlines()
    assert node.split() == ["d[/x]", "decode", "ready", "[fe80::1]:7000", "7", "0", "0", "1+2/8", "1+2/8"]
    assert lane.split()[:3] == ["p0", "d[/x]", "tcp[/x]"]
    assert any(line.split()[:2] == ["decode", "d[/x]"] for line in lines)


def test_a_decision_is_told_with_what_was_seen_expected_and_measured() -> None:
    figures = {"first_token_s": 0.25, "token_gap_s": None, "computed_tokens": 100}
    decision = {
        "plan": {"prefill": "p0", "decode": "d[/x]", "fetch_from": None},
        **{"kind": "hand_over", "reason": "turn", "cause": "request"},
        **{"predicted": figures, "measured": figures | {"first_token_s": 0.5}},
    }
    load = dict.fromkeys(("num_decoding", "num_coming", "waiting_tokens", "free_tokens", "free_slots"), 3)
    hit = {"attention_tokens": 64, "resumable_tokens": 48}
    node = {"name": "d[/x]", "role": "decode", "chosen_for": ["decode"], "hit": hit, "load": load}
    console = Console(width=160, markup=False)
    with console.capture() as said:
        console.print(decision_lines(decision))
        console.print(candidate_table([node]))
    plan, first, computed, _, row = said.get().splitlines()
    assert plan == "prefill p0, decode d[/x] (hand_over; turn; request)"
    assert first == "  first_token_s: 0.25 predicted, 0.5 measured"
    assert computed == "  computed_tokens: 100 predicted, 100 measured"
    assert row.split() == ["d[/x]", "decode", "decode", "64", "48", "3", "3", "3", "3", "3"]


def test_a_narrow_terminal_cuts_no_address_and_no_figure() -> None:
    pool = {"in_use": 1, "cached": 12345, "total": 86548}
    facts = {"role": "prefill", "state": "live", "address": "127.0.0.1:43210", "pid": 6938, "running": 0, "waiting": 0}
    console = Console(width=60)
    with console.capture() as said:
        console.print(node_table([{"name": "p0", **facts, "blocks": pool, "slots": pool}]))
    assert "…" not in said.get()
