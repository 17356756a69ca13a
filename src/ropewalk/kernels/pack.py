"""Packing: rows of a checkpoint's blocks to the panels of `kernels.formats`, bit for bit the same weights.

A format's `_decode_*` writes the unsigned quants of one block into `codes` and its scales into the panel;
`_put_*` then lay the quants of 16 rows out as nibbles and bit planes. Block layouts are those of the GGUF
format; that the weights come through unchanged is tested against `checkpoint.quants`.
"""

from functools import cache

import numpy as np
from numba import types

from ropewalk.kernels import formats as F
from ropewalk.kernels.jit import inline, kernel

# ---- from blocks: `b` is the block's bytes, `codes` uint8 [columns of the block], `s` the panel, `at` the first byte
# of the block's scales in it, and `r` the row within the panel


@inline
def _copy2(s, to, b, start):
    s[to] = b[start]
    s[to + 1] = b[start + 1]


@inline
def _split_nibbles(b, start, codes, to):
    """16 bytes: low nibbles are columns 0-15, high nibbles 16-31."""
    for i in range(16):
        codes[to + i] = b[start + i] & 15
        codes[to + 16 + i] = b[start + i] >> 4


@inline
def _add_fifth_bits(b, start, codes):
    for i in range(32):
        codes[i] |= ((b[start + (i >> 3)] >> (i & 7)) & 1) << 4


def _decode_q4_0(b, codes, s, at, r):
    _copy2(s, at + 2 * r, b, 0)
    _split_nibbles(b, 2, codes, 0)


def _decode_q4_1(b, codes, s, at, r):
    _copy2(s, at + 2 * r, b, 0)
    _copy2(s, at + 32 + 2 * r, b, 2)
    _split_nibbles(b, 4, codes, 0)


def _decode_q5_0(b, codes, s, at, r):
    _copy2(s, at + 2 * r, b, 0)
    _split_nibbles(b, 6, codes, 0)
    _add_fifth_bits(b, 2, codes)


def _decode_q5_1(b, codes, s, at, r):
    _copy2(s, at + 2 * r, b, 0)
    _copy2(s, at + 32 + 2 * r, b, 2)
    _split_nibbles(b, 8, codes, 0)
    _add_fifth_bits(b, 4, codes)


def _decode_q8_0(b, codes, s, at, r):
    _copy2(s, at + 2 * r, b, 0)
    for i in range(32):
        codes[i] = b[2 + i] ^ 128


def _decode_mxfp4(b, codes, s, at, r):
    s[at + r] = b[0]
    _split_nibbles(b, 1, codes, 0)


@inline
def _put_six_bit_scales(b, start, s, at, r):
    """Eight 6-bit scales and minima in 12 bytes."""
    for g in range(8):
        if g < 4:
            scale, minimum = b[start + g] & 63, b[start + 4 + g] & 63
        else:
            scale = (b[start + 4 + g] & 15) | ((b[start + g - 4] >> 6) << 4)
            minimum = (b[start + 4 + g] >> 4) | ((b[start + g] >> 6) << 4)
        s[at + 64 + 32 * g + r] = scale
        s[at + 64 + 32 * g + 16 + r] = minimum


@inline
def _split_four_nibble_runs(b, start, codes):
    """128 bytes: each run of 32 holds 32 columns in its low nibbles and the next 32 in its high ones."""
    for j in range(4):
        for i in range(32):
            codes[64 * j + i] = b[start + 32 * j + i] & 15
            codes[64 * j + 32 + i] = b[start + 32 * j + i] >> 4


def _decode_q4_k(b, codes, s, at, r):
    _copy2(s, at + 2 * r, b, 0)
    _copy2(s, at + 32 + 2 * r, b, 2)
    _put_six_bit_scales(b, 4, s, at, r)
    _split_four_nibble_runs(b, 16, codes)


def _decode_q5_k(b, codes, s, at, r):
    _copy2(s, at + 2 * r, b, 0)
    _copy2(s, at + 32 + 2 * r, b, 2)
    _put_six_bit_scales(b, 4, s, at, r)
    _split_four_nibble_runs(b, 48, codes)
    for g in range(8):
        for i in range(32):
            codes[32 * g + i] |= ((b[16 + i] >> g) & 1) << 4


def _decode_q6_k(b, codes, s, at, r):
    _copy2(s, at + 2 * r, b, 208)
    for g in range(8):
        s[at + 64 + 32 * g + r] = b[192 + 2 * g]
        s[at + 80 + 32 * g + r] = b[192 + 2 * g + 1]
    for n in range(2):
        for i in range(32):
            low, low2, high = b[64 * n + i], b[64 * n + 32 + i], b[128 + 32 * n + i]
            codes[128 * n + i] = (low & 15) | ((high & 3) << 4)
            codes[128 * n + 32 + i] = (low2 & 15) | (((high >> 2) & 3) << 4)
            codes[128 * n + 64 + i] = (low >> 4) | (((high >> 4) & 3) << 4)
            codes[128 * n + 96 + i] = (low2 >> 4) | ((high >> 6) << 4)


def _decode_q3_k(b, codes, s, at, r):
    _copy2(s, at + 2 * r, b, 108)
    for i in range(16):
        low = np.int64(b[96 + (i & 7)] >> (4 * (i >> 3))) & 15
        high = np.int64(b[104 + (i & 3)] >> (2 * (i >> 2))) & 3
        s[at + 64 + 16 * i + r] = ((low | (high << 4)) - 32) & 255
    for n in range(2):
        for j in range(4):
            for i in range(32):
                third = (b[i] >> (4 * n + j)) & 1
                codes[128 * n + 32 * j + i] = ((b[32 + 32 * n + i] >> (2 * j)) & 3) | (third << 2)


def _decode_q2_k(b, codes, s, at, r):
    _copy2(s, at + 2 * r, b, 80)
    _copy2(s, at + 32 + 2 * r, b, 82)
    for i in range(16):
        s[at + 64 + 16 * i + r] = b[i]
    for n in range(2):
        for j in range(4):
            for i in range(32):
                codes[128 * n + 32 * j + i] = (b[16 + 32 * n + i] >> (2 * j)) & 3


def _decode_iq4_xs(b, codes, s, at, r):
    _copy2(s, at + 2 * r, b, 0)
    high = b[2] | (np.int64(b[3]) << 8)
    for g in range(8):
        low = (b[4 + (g >> 1)] >> (4 * (g & 1))) & 15
        s[at + 64 + 16 * g + r] = ((low | (((high >> (2 * g)) & 3) << 4)) - 32) & 255
        _split_nibbles(b, 8 + 16 * g, codes, 32 * g)


# ---- to panels, four bytes at a time: `codes` is uint32 [16, words of a row], word j of a group holds the quants of
# vector j; `c` is the group's first word in it, `q` the panel as uint32, `at` the group's first word there

_LOW_BITS, _LOW_PAIRS, _LOW_NIBBLES = np.uint32(0x01010101), np.uint32(0x03030303), np.uint32(0x0F0F0F0F)


@inline
def _put_nibbles(codes, c, q, at):
    for line in range(4):
        for r in range(16):
            low, high = codes[r, c + 2 * line], codes[r, c + 2 * line + 1]
            q[at + 16 * line + r] = (low & _LOW_NIBBLES) | ((high & _LOW_NIBBLES) << np.uint32(4))


@inline
def _put_bit_plane(codes, c, q, at, shift):
    for r in range(16):
        plane = np.uint32(0)
        for j in range(8):
            plane |= ((codes[r, c + j] >> np.uint32(shift)) & _LOW_BITS) << np.uint32(j)
        q[at + r] = plane


@inline
def _put_two_bit_planes(codes, c, q, at, shift):
    for half in range(2):
        for r in range(16):
            plane = np.uint32(0)
            for j in range(4):
                plane |= ((codes[r, c + 4 * half + j] >> np.uint32(shift)) & _LOW_PAIRS) << np.uint32(2 * j)
            q[at + 16 * half + r] = plane


def _put_4(codes, c, q, at):
    _put_nibbles(codes, c, q, at)


def _put_5(codes, c, q, at):
    _put_bit_plane(codes, c, q, at, 4)
    _put_nibbles(codes, c, q, at + 16)


def _put_6(codes, c, q, at):
    _put_two_bit_planes(codes, c, q, at, 4)
    _put_nibbles(codes, c, q, at + 32)


def _put_2(codes, c, q, at):
    _put_two_bit_planes(codes, c, q, at, 0)


def _put_3(codes, c, q, at):
    _put_bit_plane(codes, c, q, at, 2)
    _put_two_bit_planes(codes, c, q, at + 16, 0)


def _put_8(codes, c, q, at):
    for j in range(8):
        for r in range(16):
            q[at + 16 * j + r] = codes[r, c + j]


_STEPS = {
    F.Q4_0: (_decode_q4_0, _put_4),
    F.IQ4_NL: (_decode_q4_0, _put_4),
    F.Q4_1: (_decode_q4_1, _put_4),
    F.Q5_0: (_decode_q5_0, _put_5),
    F.Q5_1: (_decode_q5_1, _put_5),
    F.Q8_0: (_decode_q8_0, _put_8),
    F.MXFP4: (_decode_mxfp4, _put_4),
    F.Q4_K: (_decode_q4_k, _put_4),
    F.Q5_K: (_decode_q5_k, _put_5),
    F.Q6_K: (_decode_q6_k, _put_6),
    F.Q3_K: (_decode_q3_k, _put_3),
    F.Q2_K: (_decode_q2_k, _put_2),
    F.IQ4_XS: (_decode_iq4_xs, _put_4),
}


@cache
def packer(kind: int, block_bytes: int):
    """The compiled packer of a format.

    Parameters
    ----------
    kind : int
        Format number of `kernels.formats`.
    block_bytes : int
        Bytes of one of the checkpoint's blocks; for float formats, of one element.

    Returns
    -------
    callable
        `pack(raw, panels, first)`: raw uint8 [rows, row bytes], panels uint8 [n_panels, panel bytes], zeroed;
        fills panels from row `16 * first` on. Rows beyond the last stay zero, which is a weight of zero.
    """
    if kind in F.FLOAT_KINDS:
        return _float_packer(block_bytes)
    packed = F.FORMAT_OF_KIND[kind]
    decode, put = (inline(step) for step in _STEPS[kind])
    sizes = packed.block_groups, packed.quant_bytes, packed.scale_bytes, packed.block_bytes
    return _block_packer(kind, decode, put, block_bytes, *sizes)


def compile_packer(kind: int, block_bytes: int) -> None:
    """Compile (or load) a packer ahead of its first call."""
    raw = types.Array(types.uint8, 2, "C", readonly=True)
    packer(kind, block_bytes).compile((raw, types.Array(types.uint8, 2, "C"), types.int64))


def _float_packer(size: int):
    @kernel
    def pack(raw, panels, first):
        for p in range(panels.shape[0]):
            for r in range(min(16, raw.shape[0] - 16 * (first + p))):
                row = raw[16 * (first + p) + r]
                for k in range(row.size // size):
                    for i in range(size):
                        panels[p, (16 * k + r) * size + i] = row[k * size + i]

    return pack


def _block_packer(kind, decode, put, raw_bytes, groups, quant_bytes, scale_bytes, block_bytes):
    @kernel
    def pack(raw, panels, first):
        codes = np.zeros((16, 32 * groups), np.uint8)
        code_words = codes.view(np.uint32)
        for p in range(panels.shape[0]):
            panel = panels[p]
            words = panel.view(np.uint32)
            rows = min(16, raw.shape[0] - 16 * (first + p))
            codes[:] = 0
            for block in range(raw.shape[1] // raw_bytes):
                at = block * block_bytes
                for r in range(rows):
                    source = raw[16 * (first + p) + r, block * raw_bytes : (block + 1) * raw_bytes]
                    decode(source, codes[r], panel, at, r)
                for g in range(groups):
                    put(code_words, 8 * g, words, (at + scale_bytes + g * quant_bytes) // 4)

    return pack
