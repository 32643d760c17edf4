"""Which two nodes can hand over to each other: what they say of themselves at registration decides it."""


def transfer_refusal(device: str, peer_device: str) -> str | None:
    """Why nothing can be handed over between nodes on these kinds of device, either way; None when it can."""
    if (device == "cuda") == (peer_device == "cuda"):
        return None
    return (
        f"a node on {device} and one on {peer_device} cannot hand over: without a GPU a node opens UCX without CUDA, "
        "and UCX then finds no protocol between GPU and host memory; give both pools nodes of one kind"
    )
