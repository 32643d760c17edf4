from headrace.wire.node_messages import transfer_refusal


def test_a_pair_of_a_gpu_and_a_host_is_refused_with_what_to_do():
    for pair in (("cuda", "cpu"), ("cpu", "cuda")):
        assert "run prefill and decode nodes on one kind of device" in transfer_refusal(*pair)
    assert transfer_refusal("cpu", "cpu") is transfer_refusal("cuda", "cuda") is None
