"""Terminal tables of a cluster and of a request's report.

Texts from a router go into a table as `Text`: in a `str` rich would take brackets for markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from deploy.api import ChatAnswer

UNITS = ("B", "KiB", "MiB", "GiB")


def node_table(nodes: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each node; pools as in use+cached/total."""
    facts = ("name", "role", "state", "address", "pid", "running", "waiting")
    table = _table(*facts, "blocks: used+ cached/ all", "slots: used+ cached/ all")
    for node in nodes:
        pools = (_pool(node["blocks"]), _pool(node["slots"]))
        table.add_row(*(Text(text) for text in (*(str(node[fact]) for fact in facts), *pools)))
    return table


def _table(*columns: str) -> Table:
    """A table whose cells break where the terminal is narrow: an address or a figure that is cut is of no use."""
    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _pool(pool: Mapping[str, int]) -> str:
    return f"{pool['in_use']}+{pool['cached']}/{pool['total']}"


def link_table(links: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each direction of transfers, as the sending node measured it."""
    table = _table("from", "to", "over", "GB/s", "round trip", "note")
    for link in links:
        speed, trip = link["bytes_per_s"], link["round_trip_s"]
        problem = link["error"] or link["warning"]
        table.add_row(
            Text(link["from"]),
            Text(link["to"]),
            Text(", ".join(link["lanes"])),
            "" if speed is None else f"{speed / 1e9:.2f}",
            "" if trip is None else f"{trip * 1e6:.0f} us",
            Text(problem, style="yellow") if problem else "" if speed is not None else "not measured yet",
        )
    return table


def decision_lines(decision: Mapping[str, Any]) -> str:
    """One routing decision in words: the plan, its reason, and each predicted figure with the measured one."""
    plan = decision["plan"]
    nodes = {"prefill": plan["prefill"], "decode": plan["decode"], "fetch from": plan["fetch_from"]}
    chosen = ", ".join(f"{part} {name}" for part, name in nodes.items() if name is not None)
    text = f"{chosen} ({decision['kind']}; {decision['reason']}; {decision['cause']})"
    for figure, predicted in decision["predicted"].items():
        measured = decision["measured"][figure]
        if predicted is not None or measured is not None:
            text += f"\n  {figure}: {_known(predicted)} predicted, {_known(measured)} measured"
    return text


def _known(figure: float | None) -> str:
    return "not" if figure is None else f"{figure:g}"


def candidate_table(candidates: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each node that the policy saw: what it held of the prompt, and what it had to do."""
    facts = ("node", "role", "chosen for", "attention hit", "resumable", "decoding", "coming", "waiting tokens")
    table = _table(*facts, "free tokens", "free slots")
    for each in candidates:
        hit, load = each["hit"], each["load"]
        figures = (hit["attention_tokens"], hit["resumable_tokens"], load["num_decoding"], load["num_coming"])
        rest = (load["waiting_tokens"], load["free_tokens"], load["free_slots"])
        row = (each["name"], each["role"], ", ".join(each["chosen_for"]), *map(str, (*figures, *rest)))
        table.add_row(*(Text(text) for text in row))
    return table


def drained_text(report: Mapping[str, Any]) -> str:
    """One line about a drained node: what has become of its requests."""
    return (
        f"{report['node']} is drained: {report['moved']} requests moved, {report['recomputed']} began again elsewhere, "
        f"{report['ended']} ended; {report['seconds']:.2f} s"
    )


def report_table(answer: ChatAnswer) -> Table:
    """The origin of a request's tokens, group by group."""
    table = Table(box=None, show_header=False, padding=(0, 2), pad_edge=True)
    for name, text in report_lines(answer):
        table.add_row(Text(name, style="dim"), Text(text))
    return table


def report_lines(answer: ChatAnswer) -> list[tuple[str, str]]:
    """The report as (name, text) pairs, in the order of the request's path."""
    usage, report = answer.usage, answer.report
    lines = [("tokens", _usage(usage))]
    if report is not None:
        if prefill := report.get("prefill"):
            lines.append((f"prefill {prefill['node']}", _prefill(prefill)))
        if transfer := report.get("transfer"):
            lines.append(("transfer", _transfer(transfer)))
        if decode := report.get("decode"):
            lines.append((f"decode {decode['node']}", _decode(decode, report["path"])))
    first = "" if answer.first_token_s is None else f"first token {answer.first_token_s * 1e3:.0f} ms, "
    lines.append(("time", f"{first}whole answer {answer.total_s * 1e3:.0f} ms"))
    return lines


def _usage(usage: Mapping[str, Any]) -> str:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return f"{usage['prompt_tokens']} in the prompt, {cached} of them cached; {usage['completion_tokens']} generated"


def _prefill(prefill: Mapping[str, Any]) -> str:
    return (
        f"attention hit {prefill['attention_hit_tokens']}, state hit {prefill['state_hit_tokens']}, "
        f"computed {prefill['computed_tokens']} tokens"
    )


def _transfer(transfer: Mapping[str, Any]) -> str:
    return (
        f"attention {size(transfer['attention_bytes'])} ({transfer['attention_tokens']} tokens), "
        f"state {size(transfer['state_bytes'])}, {transfer['seconds'] * 1e3:.1f} ms"
    )


def _decode(decode: Mapping[str, Any], path: str) -> str:
    where = "prefilled here" if path == "local" else "prefilled remotely"
    fetched = f", fetched {decode['fetched_tokens']} tokens" if decode.get("fetched_tokens") else ""
    drafted, accepted = (decode.get(f"{name}_tokens", 0) for name in ("drafted", "accepted"))
    drafts = f", {accepted} of {drafted} drafts accepted" if drafted else ""
    return f"{where}, attention hit {decode['attention_hit_tokens']}, state {decode['state']}{fetched}{drafts}"


def size(num_bytes: float) -> str:
    """Bytes for people: 768 KiB."""
    unit = 0
    while num_bytes >= 1024 and unit < len(UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:.0f} {UNITS[unit]}" if num_bytes >= 10 or unit == 0 else f"{num_bytes:.1f} {UNITS[unit]}"
