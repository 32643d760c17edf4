"""One request's trace through a router, a prefill node and a decode node, at a real OTLP receiver."""

from pathlib import Path

import httpx

from headrace.tracing import TracingConfig
from tests.support.cluster.cluster import Cluster
from tests.support.otlp_receiver import otlp_receiver
from tests.support.patience import PATIENCE_S

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {
    "messages": [{"role": "user", "content": "What is the code of June? " * 20}],
    "max_tokens": 8,
    "ignore_eos": True,
}
SPANS = {
    ("headrace-router", "request"): ("queue", "prefill", "hand_over", "decode"),
    ("headrace-node", "prefill call"): ("line", "compute", "send"),
    ("headrace-node", "decode call"): ("admission", "receive", "generate"),
}


def test_a_clients_trace_has_the_routers_and_the_nodes_stages(tiny_checkpoint, tmp_path: Path):
    with otlp_receiver() as receiver:
        tracing = {"tracing": TracingConfig(receiver.url, sample=0.0)}
        with Cluster(tiny_checkpoint("qwen35"), tmp_path, router=tracing, prefill=tracing, decode=tracing) as cluster:
            url = f"{cluster.url}/v1/chat/completions"
            httpx.post(url, json=CHAT, timeout=PATIENCE_S).raise_for_status()  # is in no trace, and gets none
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
            httpx.post(url, json=CHAT, headers=headers, timeout=PATIENCE_S).raise_for_status()
            found = receiver.wait_for(sum(1 + len(stages) for stages in SPANS.values()) - 1)  # hand_over may be hidden
    roots = {(service, span.name): span for service, span in found if (service, span.name) in SPANS}
    assert {span.trace_id.hex() for _, span in found} == {TRACE} and roots.keys() == SPANS.keys()
    router = roots["headrace-router", "request"]
    assert router.parent_span_id.hex() == SPAN
    for key, root in roots.items():
        stages = [span for _, span in found if span.parent_span_id == root.span_id and span.name in SPANS[key]]
        assert {span.name for span in stages} >= set(SPANS[key]) - {"hand_over"}
        for stage in stages:
            assert root.start_time_unix_nano <= stage.start_time_unix_nano <= stage.end_time_unix_nano
            assert stage.end_time_unix_nano <= root.end_time_unix_nano
        if root is not router:
            assert root.parent_span_id == router.span_id
    attributes = {each.key: each.value for each in router.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 8
