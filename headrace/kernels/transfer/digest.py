"""XXH3-128 of equal pages of bytes, the same as the library's, so that a host and a GPU agree.

Shapes    pages [P, E] bytes, contiguous, their address a multiple of 16; E a multiple of 1,024; summary int64 [S],
          contiguous, the page hashes, beside them or in the host's pinned memory
Contract  a payload's bytes fill the first pages, the last of them perhaps in part. Its page hashes are XXH3-128,
          seed 0, of each whole page, 16 bytes in canonical (big-endian) order, and then the part's bytes, copied in
          whole words: up to seven bytes past the payload come with them. The host waits for nothing. For GPUs alone: on
          hosts the library is faster (transfer/protocol/digest.py)
Numerics  bit-exact
Source    https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 algorithm for large inputs"

A page is blocks of 16 stripes of 8 words w of 64 bits; s are words of a fixed secret, a[0..7] start at fixed primes.

    each stripe n of a block     k = w[i] ^ s[n + i];   a[i ^ 1] += w[i];   a[i] += low32(k) * high32(k)
    after each block but one     a[i] = (a[i] ^ a[i] >> 47 ^ s[16 + i]) * P32_1
    the page's last stripe       as above, with s from byte 121 of the secret
    at the end, twice            h = start + sum over i of fold(a[2i] ^ t[2i], a[2i + 1] ^ t[2i + 1]);   avalanche(h)

fold is a product of 128 bits, its halves xored; t is the secret from byte 11 on for the low half of the hash, from
117 on for the high one. Sums inside a block can be in any order: a thread takes two neighbouring words, which swap
places in a, of all of its stripes at once; four threads hash a page.
"""

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
import xxhash
from torch import Tensor

from headrace.kernels.lib.launch import launch
from headrace.kernels.lib.sizes import cdiv

DIGEST_BYTES = 16
BLOCK_BYTES = 1024
PAGES_A_PROGRAM = 8  # four threads each: one warp
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def digest_pages_xxhash(pages: Tensor) -> Tensor:
    """Digests [P, 16] of pages [P, E], by the hash's own library: the reference."""
    digests = b"".join(xxhash.xxh3_128_digest(page.data) for page in pages.numpy())
    return torch.from_numpy(np.frombuffer(bytearray(digests), np.uint8)).view(-1, DIGEST_BYTES)


@triton.jit
def _fold(a, b):
    """The 128-bit product of two 64-bit words, its halves xored."""
    return (a * b) ^ tl.umulhi(a, b)


@triton.jit
def _swapped_bytes(x):
    x = ((x & 0x00FF00FF00FF00FF) << 8) | ((x >> 8) & 0x00FF00FF00FF00FF)
    x = ((x & 0x0000FFFF0000FFFF) << 16) | ((x >> 16) & 0x0000FFFF0000FFFF)
    return (x << 32) | (x >> 32)


@triton.jit
def _mixed(even, odd, secret_even, secret_odd):
    """Addends of a stripe's words, [PAGES, 4] each, to the even and the odd accumulators."""
    key_even, key_odd = even ^ secret_even, odd ^ secret_odd
    return odd + (key_even & 0xFFFFFFFF) * (key_even >> 32), even + (key_odd & 0xFFFFFFFF) * (key_odd >> 32)


@triton.jit
def _stripe(pages_ptr, words, mask):
    """A stripe's even and odd words, [PAGES, 4] each; a thread loads both halves of 16 bytes at once."""
    pairs = tl.reshape(tl.load(pages_ptr + words, mask=mask, other=0), (words.shape[0], 4, 2))
    even, odd = tl.split(pairs)
    return even.to(tl.uint64, bitcast=True), odd.to(tl.uint64, bitcast=True)


@triton.jit
def _secret(secret_ptr, word):
    """Four secret words `word`, `word + 2`, ... and the four between them, [1, 4] each."""
    pair = word + 2 * tl.arange(0, 4)
    even, odd = tl.load(secret_ptr + pair), tl.load(secret_ptr + pair + 1)
    return even.to(tl.uint64, bitcast=True)[None, :], odd.to(tl.uint64, bitcast=True)[None, :]


@triton.jit
def _merged(even, odd, secret_ptr, word, start):
    """Half of each hash, [PAGES], from the accumulators, in canonical order."""
    secret_even, secret_odd = _secret(secret_ptr, word)
    h = tl.sum(_fold(even ^ secret_even, odd ^ secret_odd), axis=1) + start
    h = (h ^ (h >> 37)) * 0x165667919E3779F9
    return _swapped_bytes(h ^ (h >> 32))


@triton.jit
def _copy_tail(source_ptr, target_ptr, num_words, WORDS: tl.constexpr):
    for first in range(0, WORDS, 128):
        word = first + tl.arange(0, 128)
        tl.store(target_ptr + word, tl.load(source_ptr + word, mask=word < num_words), mask=word < num_words)


@triton.jit(do_not_specialize=["num_pages", "tail_words"])
def _digest_pages_kernel(
    pages_ptr,  # [P, WORDS] int64
    secret_ptr,  # the words of `_secret_words`
    summary_ptr,  # [2 * num_pages + tail_words] int64
    num_pages,
    tail_words,
    low_start,
    high_start,
    WORDS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """A program hashes PAGES pages; one more program copies the tail, if there is one."""
    if tl.program_id(0) * PAGES >= num_pages:
        tail_ptr = pages_ptr + num_pages.to(tl.int64) * WORDS
        _copy_tail(tail_ptr, summary_ptr + 2 * num_pages, tail_words, WORDS)
        return
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    mask = (page < num_pages)[:, None]
    words = page.to(tl.int64)[:, None] * WORDS + tl.arange(0, 8)[None, :]
    even, odd = _secret(secret_ptr, 48)  # where a starts
    even, odd = tl.broadcast_to(even, (PAGES, 4)), tl.broadcast_to(odd, (PAGES, 4))
    scramble_even, scramble_odd = _secret(secret_ptr, 16)
    for _ in range(WORDS // 128 - 1):
        for n in tl.static_range(16):
            more_even, more_odd = _mixed(*_stripe(pages_ptr, words + n * 8, mask), *_secret(secret_ptr, n))
            even, odd = even + more_even, odd + more_odd
        even = (even ^ (even >> 47) ^ scramble_even) * 0x9E3779B1
        odd = (odd ^ (odd >> 47) ^ scramble_odd) * 0x9E3779B1
        words += 128
    for n in tl.static_range(16):
        secret_even, secret_odd = _secret(secret_ptr, n if n < 15 else 24)
        more_even, more_odd = _mixed(*_stripe(pages_ptr, words + n * 8, mask), secret_even, secret_odd)
        even, odd = even + more_even, odd + more_odd
    low = _merged(even, odd, secret_ptr, 32, low_start.to(tl.uint64))
    high = _merged(even, odd, secret_ptr, 40, high_start.to(tl.uint64))
    tl.store(summary_ptr + 2 * page, high.to(tl.int64, bitcast=True), mask=page < num_pages)
    tl.store(summary_ptr + 2 * page + 1, low.to(tl.int64, bitcast=True), mask=page < num_pages)


def digest_pages(words: Tensor, summary: Tensor, num_bytes: int, pages_a_program: int = PAGES_A_PROGRAM) -> int:
    """Writes the page hashes of the first `num_bytes` in `words`, int64 [P, E / 8]; returns their length in bytes."""
    if {words.dtype, summary.dtype} != {torch.int64} or not (words.is_contiguous() and summary.is_contiguous()):
        raise ValueError(
            f"pages {words.dtype}, strides {words.stride()}, summary {summary.dtype}, strides {summary.stride()}: "
            "not rows of int64"
        )
    words_a_page = words.shape[1]
    if words_a_page == 0 or words_a_page % (BLOCK_BYTES // 8):
        raise ValueError(f"pages of {8 * words_a_page} bytes: give them a multiple of {BLOCK_BYTES}")
    num_pages, tail_bytes = divmod(num_bytes, 8 * words_a_page)
    tail_words = cdiv(tail_bytes, 8)
    if not 0 <= num_bytes <= words.nbytes or 2 * num_pages + tail_words > len(summary):
        raise ValueError(f"{num_bytes} bytes of {tuple(words.shape)} words, to a summary of {len(summary)} words")
    if num_bytes:
        launch(
            _digest_pages_kernel,
            cdiv(num_pages, pages_a_program) + (tail_words > 0),
            (words, _secret_words(words.device), summary),
            (num_pages, tail_words, *_starts(8 * words_a_page)),
            (words_a_page, pages_a_program),
            num_warps=max(1, pages_a_program // 8),
        )
    return num_pages * DIGEST_BYTES + tail_bytes


@cache
def _starts(page_bytes: int) -> tuple[int, int]:
    """Start values of both halves' sums, which hold the page's length, as signed 64-bit numbers."""
    low = page_bytes * 0x9E3779B185EBCA87 % (1 << 64)
    high = ~(page_bytes * 0xC2B2AE3D27D4EB4F) % (1 << 64)
    return low - (low >> 63 << 64), high - (high >> 63 << 64)


@cache
def _secret_words(device: torch.device) -> Tensor:
    """int64 [56]: the secret (24 words), then from its bytes 121, 11 and 117 on (8 words each), and where a starts."""
    primes = [
        0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
        0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
    ]  # fmt: skip
    parts = [_SECRET, _SECRET[121:185], _SECRET[11:75], _SECRET[117:181], np.array(primes, "<u8").tobytes()]
    return torch.from_numpy(np.frombuffer(b"".join(parts), "<i8").copy()).to(device)
