"""The cost formula of NVIDIA Dynamo's KV router.

    cost = prefill_load_scale * (active prefill blocks + the prompt's blocks - overlap_credit * its cached blocks)
         + (active decode blocks + the prompt's blocks)
         + decode_active_request_weight * active requests

Source: ai-dynamo/dynamo 1.6, docs/fern/pages/developer-guide/knowledge-base/modular-components/router, its pages
routing-concepts, configuration-and-tuning and disaggregated-serving. Its defaults are the defaults here; its tuner
found a `prefill_load_scale` of 32 on traces of agents. Behind a prefill node, a decode node's cached blocks do not
count.

Differences: Dynamo counts a block that several active requests share once, and does not see checkpoints: for a hybrid
it counts attention blocks from which no node can resume, and so does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import at_least, refuse
from headrace.wire.node_messages import Role
from router.routing.candidates import Candidate
from router.routing.plan import Plan, RoutedRequest
from router.routing.policies.stages import two_stages

TUNED_PREFILL_LOAD_SCALE = 32.0


@dataclass(frozen=True)
class Dynamo:
    """Least cost by Dynamo's formula.

    prefill_load_scale             weight of the blocks that the node has to compute
    overlap_credit                 of a cached block, in computed ones
    decode_active_request_weight   blocks for which a decoding request counts besides its own
    """

    prefill_load_scale: float = 1.0
    overlap_credit: float = 1.0
    decode_active_request_weight: float = 0.0

    def __post_init__(self) -> None:
        refuse(at_least(self, 0, "prefill_load_scale", "overlap_credit", "decode_active_request_weight"))

    def choose(self, request: RoutedRequest, candidates: Sequence[Candidate]) -> Plan | None:
        def decode(node: Candidate) -> float:
            active_blocks = (node.load.context_tokens + node.load.waiting_tokens) / node.block_size
            own_blocks = request.num_tokens / node.block_size
            return active_blocks + own_blocks + self.decode_active_request_weight * node.load.num_decoding

        def prefill(node: Candidate) -> float:
            own_blocks = (request.num_tokens - self.overlap_credit * node.hit.attention_tokens) / node.block_size
            cost = self.prefill_load_scale * (node.load.waiting_tokens / node.block_size + own_blocks)
            return cost if node.role is Role.PREFILL else cost + decode(node)

        return two_stages(request, candidates, prefill=prefill, decode=decode, reason="cost")
