"""The report of one request's work: the `headrace` object of the final usage, gathered from the nodes' messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from headrace.wire import messages as m
from router.routing.decisions import Decision


@dataclass
class RequestReport:
    """Facts reported so far; None: not reported.

    reused_tokens   prompt tokens that no node had to compute: the resumed tokens of the prefill node, or of the decode
                    node for a local prefill; the minimum over repeated prefills
    migrations      times that the request began again on other nodes
    moves           times that it moved to another decode node, which computed nothing of it
    """

    prefill_node: str | None = None
    prefill: m.PrefillReport | None = None
    decode_node: str | None = None
    decode: m.DecodeReport | None = None
    attention_hit_tokens: int | None = None
    transfer: m.TransferReport | None = None
    path: Literal["remote", "local"] = "remote"
    migrations: int = 0
    moves: int = 0
    reused_tokens: int | None = None
    routing: Decision | None = None

    def prefill_started(self, node: str) -> None:
        self.prefill_node, self.path = node, "remote"

    def reserved(self, reservation: m.Reservation) -> None:
        self.attention_hit_tokens = reservation.attention_hit_tokens

    def local_prefill(self, resumed_tokens: int) -> None:
        self.path = "local"
        self._reuse(resumed_tokens)

    def prefill_done(self, report: m.PrefillReport) -> None:
        self.prefill = report
        self._reuse(report.resumed_tokens)

    def decode_done(self, report: m.DecodeReport) -> None:
        self.decode = report
        self.attention_hit_tokens = report.attention_hit_tokens

    def _reuse(self, tokens: int) -> None:
        self.reused_tokens = tokens if self.reused_tokens is None else min(tokens, self.reused_tokens)

    def cached_tokens(self, num_prompt_tokens: int) -> int:
        """`usage.prompt_tokens_details.cached_tokens`: prompt tokens that no node had to compute."""
        return min(self.reused_tokens or 0, num_prompt_tokens)

    def json(self) -> dict[str, Any]:
        """The `headrace` object of the final usage."""
        return {
            "path": self.path,
            "prefill": self._prefill_json(),
            "decode": self._decode_json(),
            "transfer": self._transfer_json(),
            "checkpoints": self._checkpoints(),
            "migrations": self.migrations,
            "moves": self.moves,
            "routing": None if self.routing is None else self.routing.summary(),
        }

    def _prefill_json(self) -> dict[str, Any] | None:
        if self.path == "local" or self.prefill is None:
            return None
        return {
            "node": self.prefill.node,
            "attention_hit_tokens": self.prefill.attention_hit_tokens,
            "state_hit_tokens": self.prefill.state_hit_tokens,
            "fetched_tokens": self.prefill.fetched_tokens,
            "computed_tokens": self.prefill.computed_tokens,
        }

    def _decode_json(self) -> dict[str, Any] | None:
        if self.decode is None:
            return None
        return {
            "node": self.decode.node,
            "attention_hit_tokens": self.decode.attention_hit_tokens,
            "state": self.decode.state,
            "fetched_tokens": self.decode.fetched_tokens,
            "drafted_tokens": self.decode.drafted_tokens,
            "accepted_tokens": self.decode.accepted_tokens,
        }

    def _transfer_json(self) -> dict[str, Any] | None:
        if self.path == "local" or self.transfer is None:
            return None
        return {
            "attention_tokens": self.transfer.attention_tokens,
            "attention_bytes": self.transfer.attention_bytes,
            "state_bytes": self.transfer.state_bytes,
            "seconds": round(self.transfer.seconds, 6),
        }

    def _checkpoints(self) -> list[int]:
        """Positions of the checkpoints that either node published, in order."""
        published = (report.checkpoints for report in (self.prefill, self.decode) if report is not None)
        return sorted({position for positions in published for position in positions})
