"""Routing policies by the names that `router.policy` takes."""

from __future__ import annotations

from collections.abc import Mapping

from router.routing.plan import Policy
from router.routing.policies.dynamo import TUNED_PREFILL_LOAD_SCALE, Dynamo
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.policies.llm_d import LlmD
from router.routing.policies.predicted import Predicted
from router.routing.policies.round_robin import RoundRobin

POLICIES: Mapping[str, Policy] = {
    "predicted": Predicted(),
    "round_robin": RoundRobin(),
    "least_loaded": LeastLoaded(),
    "dynamo": Dynamo(),
    "dynamo_tuned": Dynamo(prefill_load_scale=TUNED_PREFILL_LOAD_SCALE),
    "llm_d": LlmD(),
}
