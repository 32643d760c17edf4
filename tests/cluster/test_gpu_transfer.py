"""Transfers between two processes' GPU buffers, over UCX. Two GPUs if there are, else both on one."""

import asyncio
import os
import sys
import time

import pytest
import torch

from tests.cluster.test_ucx_transfer import MIB, plan, staging_is_whole, tiny_plan
from tests.support.transfer.transfer_peer import ROOT, START_TIMEOUT_S, Peer

on_gpus = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture
async def pair():
    other = f"cuda:{torch.cuda.device_count() - 1}"
    async with Peer.start(device="cuda:0") as prefill, Peer.start(device=other) as decode:
        yield prefill, decode


@on_gpus
async def test_64_mib_and_a_state_arrive_byte_for_byte_without_passing_through_the_host(pair):
    prefill, decode = pair
    landed = await decode.expect(plan(1))
    sent = prefill.send(plan(1), decode)
    received = await landed
    await sent
    assert (received["wrong"], received["messages"]) == (0, 9)
    assert (received["attention_bytes"], received["state_bytes"]) == (64 * MIB, 8 * MIB)
    reports = [await staging_is_whole(peer, within_s=1) for peer in pair]
    assert "cuda_ipc" in reports[0]["describe"][f"to {decode.address}"]


@on_gpus
async def test_a_hundred_small_sessions_at_once(pair):
    prefill, decode = pair
    plans = [tiny_plan(nonce) for nonce in range(1, 101)]
    landed = [await decode.expect(each) for each in plans]
    sent = [prefill.send(each, decode) for each in plans]
    assert {received["wrong"] for received in await asyncio.gather(*landed)} == {0}
    await asyncio.gather(*sent)
    for peer in pair:
        await staging_is_whole(peer, within_s=1)


@on_gpus
async def test_a_killed_sender_fails_the_receiver_at_once_and_its_staging_comes_back(pair):
    prefill, decode = pair
    landed = await decode.expect(plan(1, mib=1024), within_s=60)
    prefill.send(plan(1, mib=1024), decode, within_s=60)
    await decode.heard("landed", 3)
    prefill.process.kill()
    killed_s = time.monotonic()
    assert (await landed)["failed"] == "peer_lost"
    assert time.monotonic() - killed_s < 2
    await staging_is_whole(decode, within_s=2)


@on_gpus
async def test_a_killed_receiver_fails_the_sender_and_its_staging_comes_back(pair):
    prefill, decode = pair
    await decode.expect(plan(1, mib=1024), within_s=60)
    sent = prefill.send(plan(1, mib=1024), decode, within_s=60)
    await decode.heard("landed", 3)
    decode.process.kill()
    killed_s = time.monotonic()
    assert (await sent)["failed"] == "peer_lost"
    assert time.monotonic() - killed_s < 2
    await staging_is_whole(prefill, within_s=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
async def test_a_gpu_node_does_not_start_where_ucx_has_no_cuda():
    """UCX would go without, and move GPU memory through TCP at a hundredth of the speed."""
    program = (
        "import asyncio\n"
        "from transfer.ucx import open_transport\n"
        "from transfer.ucx import UcxConfig\n"
        "async def main(): open_transport(UcxConfig(cuda=True))\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=ROOT, env={**os.environ}, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), START_TIMEOUT_S)
    assert process.returncode == 1
    assert "TransportUnavailable: UCX has no cuda_copy and no cuda_ipc here" in errors.decode()
