"""Pages hashed by the Triton kernel as XXH3's own library hashes them."""

import pytest
import torch
import xxhash

from headrace.kernels.lib.sizes import cdiv
from headrace.kernels.transfer.digest import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    PAGES_A_PROGRAM,
    digest_pages,
    digest_pages_xxhash,
)
from tests.support.kernels.compiled import Launch, compile_for_h200

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_pages(num_pages: int, page_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_pages)
    return torch.randint(0, 256, (num_pages, page_bytes), dtype=torch.uint8, generator=generator)


def hashed(pages: torch.Tensor, pages_a_program: int = PAGES_A_PROGRAM) -> torch.Tensor:
    digests = torch.full((len(pages) + 1, DIGEST_BYTES // 8), -1, dtype=torch.int64, device=pages.device)
    digest_pages(pages.view(torch.int64), digests.view(-1), pages.nbytes, pages_a_program)
    assert (digests[len(pages) :] == -1).all()
    return digests[: len(pages)].view(torch.uint8)


@pytest.mark.parametrize("page_bytes", [BLOCK_BYTES, 2 * BLOCK_BYTES, 8 * BLOCK_BYTES])
@pytest.mark.parametrize("num_pages", [1, 7, 8, 33])
def test_every_page_has_the_librarys_hash(num_pages: int, page_bytes: int):
    pages = random_pages(num_pages, page_bytes)
    for _ in range(1 if DEVICE.type == "cpu" else 2):  # compiled and launched; then launched
        digests = hashed(pages.to(DEVICE))
        assert torch.equal(digests.cpu(), digest_pages_xxhash(pages))


@pytest.mark.parametrize("pages_a_program", [8, 16, 32])
def test_pages_a_program_change_nothing(pages_a_program: int):
    pages = random_pages(40, 8192)
    digests = hashed(pages.to(DEVICE), pages_a_program)
    assert torch.equal(digests.cpu(), digest_pages_xxhash(pages))


@pytest.mark.parametrize("fill", [0, 1, 0x7F, 0x80, 0xFF])
def test_words_at_the_edges_of_their_range(fill: int):
    pages = torch.full((2, 2048), fill, dtype=torch.uint8)
    assert torch.equal(hashed(pages.to(DEVICE)).cpu(), digest_pages_xxhash(pages))


def test_a_part_of_a_larger_buffer_and_no_page_at_all():
    buffer = random_pages(5, 8192).view(-1)
    pages = buffer.to(DEVICE)[16 : 16 + 3 * 8192].view(3, 8192)
    expected = xxhash.xxh3_128_digest(bytes(buffer[16 : 16 + 8192].tolist()))
    assert bytes(hashed(pages).cpu()[0].tolist()) == expected
    assert hashed(pages[:0]).shape == (0, 16)


def test_only_so_many_pages_are_hashed_as_there_are_said_to_be():
    pages = random_pages(9, 2048).to(DEVICE)
    digests = torch.full((9, 2), -1, dtype=torch.int64, device=DEVICE)
    digest_pages(pages.view(torch.int64), digests.view(-1), 3 * 2048)
    assert torch.equal(digests[:3].view(torch.uint8).cpu(), digest_pages_xxhash(pages[:3].cpu()))
    assert (digests[3:] == -1).all()


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 1000, 2047, 2048 + 1, 9 * 2048 + 1040, 10 * 2048])
def test_what_is_no_whole_page_stands_behind_the_others_digests(num_bytes: int):
    pages = random_pages(10, 2048)
    found = torch.full((400,), -1, dtype=torch.int64, device=DEVICE)
    length = digest_pages(pages.to(DEVICE).view(torch.int64), found, num_bytes)
    whole, end = num_bytes // 2048, cdiv(length, 8)
    assert length == whole * DIGEST_BYTES + num_bytes % 2048
    summary = found.cpu().view(torch.uint8)
    assert torch.equal(summary[: whole * DIGEST_BYTES].view(-1, DIGEST_BYTES), digest_pages_xxhash(pages[:whole]))
    tail = pages.view(-1)[whole * 2048 : num_bytes]
    assert torch.equal(summary[whole * DIGEST_BYTES :][: len(tail)], tail)
    assert (found[end:] == -1).all()


def test_pages_that_are_not_whole_blocks_or_have_no_room_are_refused():
    summary = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="multiple of 1024"):
        digest_pages(torch.zeros((2, 125), dtype=torch.int64), summary, 2000)
    with pytest.raises(ValueError, match="not rows of int64"):
        digest_pages(torch.zeros((2, 256), dtype=torch.int64)[:, ::2], summary, 2048)
    with pytest.raises(ValueError, match="not rows of int64"):
        digest_pages(torch.zeros((2, 2048), dtype=torch.uint8), summary, 4096)
    with pytest.raises(ValueError, match="not rows of int64"):
        digest_pages(torch.zeros((1, 256), dtype=torch.int64), torch.zeros(8, dtype=torch.int64)[::2], 2048)
    for pages, num_bytes in ((3, 3 * 1024), (1, 1025), (3, 2 * 1024 + 1)):
        with pytest.raises(ValueError, match=f"{num_bytes} bytes of"):
            digest_pages(torch.zeros((pages, 128), dtype=torch.int64), summary, num_bytes)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU: more than sixteen gigabytes of pages")
def test_offsets_are_not_32_bits_wide():
    far = 1 << 21  # pages of 1,024 words
    pages = torch.empty((far + 2, 8192), dtype=torch.uint8, device=DEVICE)
    pages[far:] = random_pages(2, 8192).to(DEVICE)
    found = torch.empty(2 * (far + 1) + 5, dtype=torch.int64, device=DEVICE)
    assert digest_pages(pages.view(torch.int64), found, (far + 1) * 8192 + 40) == (far + 1) * DIGEST_BYTES + 40
    summary = found[2 * far :].cpu().view(torch.uint8)
    assert torch.equal(summary[None, :DIGEST_BYTES], digest_pages_xxhash(pages[far : far + 1].cpu()))
    assert torch.equal(summary[DIGEST_BYTES:], pages[far + 1, :40].cpu())


def test_a_thread_loads_16_bytes_at_once_and_keeps_everything_in_registers():
    types = {
        "pages_ptr": "*i64:16", "secret_ptr": "*i64:16", "summary_ptr": "*i64:16",
        "num_pages": "i32", "tail_words": "i32", "low_start": "i64", "high_start": "i64",
    }  # fmt: skip
    [report] = compile_for_h200(
        [
            Launch(
                "headrace.kernels.transfer.digest:_digest_pages_kernel", types, {"WORDS": 1024, "PAGES": 8}, num_warps=1
            )
        ]
    )
    assert "v2.b64" in report.accesses("ld.global")
    assert report.stack_bytes == 0 and report.shared_bytes == 0
    assert report.resident_warps >= 12  # of which a multiprocessor has 8 to hold in 64 MiB
