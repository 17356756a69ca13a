"""Packed weight formats: how a matrix lies in memory for the kernels, and how a kernel reads it.

A matrix of `rows` x `columns` is cut into panels of 16 rows, because lanes are output rows. A panel is one stream of
blocks, each of 32 columns (or of 256, where the format has scales of scales), in the order in which it is read:

    panel = [scales of block 0][quants of block 0][scales of block 1][quants of block 1] ...   padded to 64 bytes

Scales and quants in streams of their own would look simpler, and read at 13 GB/s a thread where one stream reads at
30: the hardware's prefetcher follows one.

The quants of a group unpack to eight vectors of 64 bytes: vector j holds columns 4j..4j+3 of the 16 rows, four
bytes a row, unsigned. In memory the low four bits of vectors 2j and 2j+1 share 64 bytes (low nibble, high
nibble); further bits lie in planes of their own: one bit a weight as bit j of byte b for byte b of vector j, two
bits a weight in the same manner over two planes. The plane of fewest bits comes first, because every vector needs
it: a kernel then loads a panel in the order in which it lies in memory. (With the planes last it read at 24 GB/s
a thread instead of 31.) A weight is `scale * (quant - zero) + minimum`.

    format   quant bytes   scales of a block (x 16 rows)               a weight is
    Q4_0     256           d f16                                       d (q - 8)
    Q4_1     256           d f16, m f16                                d q + m
    Q5_0     64 + 256      d f16                                       d (q - 16)
    Q5_1     64 + 256      d f16, m f16                                d q + m
    Q8_0     512           d f16                                       d (q - 128)
    IQ4_NL   256           d f16                                       d table[q]
    MXFP4    256           e u8                                        2^(e-128) table[q]
    Q4_K     256           d, dmin f16; a group: s, m u8               d s q - dmin m
    Q5_K     64 + 256      as Q4_K
    IQ4_XS   256           d f16 (twice the room); a group: s i8       d s table[q]
    Q6_K     128 + 256     d f16 (likewise); a group: two s i8         d s (q - 32)
    Q3_K     64 + 128      as Q6_K                                     d s (q - 4)
    Q2_K     128           d, dmin f16; a group: two u8 (s, m)         d s q - dmin m
    F32, F16, BF16: column after column, 16 rows each, no scales

"Quant bytes" are those of a group of 32 columns. Two scales a group are for its columns 0-15 and 16-31. Knows nothing
of files: `pack` fills these panels.
"""

from dataclasses import dataclass

import numpy as np

PANEL_ROWS = 16
GROUP = 32
BLOCK = 256


@dataclass(frozen=True)
class PackedFormat:
    """How one format lies in a panel.

    Attributes
    ----------
    kind : int
        Compile-time number of the format.
    quant_bytes : int
        Bytes of quants for 16 rows x 32 columns.
    header_bytes, group_bytes : int
        Scale bytes of a block, and of each group in it, for 16 rows.
    blocked : bool
        Whether a block is 256 columns (8 groups) instead of 32 (one group).
    zero : int
        What is subtracted from an unsigned quant; a power of two, or 0.
    wide : bool
        Whether quants use all eight bits.
    halves : bool
        Whether columns 0-15 and 16-31 of a group have scales of their own.
    affine : bool
        Whether there is a minimum.
    """

    name: str
    kind: int
    quant_bytes: int
    header_bytes: int
    group_bytes: int
    blocked: bool = False
    zero: int = 0
    wide: bool = False
    halves: bool = False
    affine: bool = False

    @property
    def block_groups(self) -> int:
        """Groups in a block."""
        return BLOCK // GROUP if self.blocked else 1

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scales, for 16 rows."""
        return self.header_bytes + self.block_groups * self.group_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, for 16 rows."""
        return self.scale_bytes + self.block_groups * self.quant_bytes

    def panel_bytes(self, columns: int) -> int:
        """Bytes of one panel of 16 rows, a multiple of 64."""
        blocks = columns // (GROUP * self.block_groups)
        return -(-blocks * self.block_bytes // 64) * 64


Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, Q4_K, Q5_K, IQ4_XS, Q6_K, Q3_K, Q2_K, F32, F16, BF16 = range(16)

PACKED: dict[str, PackedFormat] = {
    f.name: f
    for f in (
        PackedFormat("Q4_0", Q4_0, 256, 0, 32, zero=8),
        PackedFormat("Q4_1", Q4_1, 256, 0, 64, affine=True),
        PackedFormat("Q5_0", Q5_0, 320, 0, 32, zero=16),
        PackedFormat("Q5_1", Q5_1, 320, 0, 64, affine=True),
        PackedFormat("Q8_0", Q8_0, 512, 0, 32, zero=128, wide=True),
        PackedFormat("IQ4_NL", IQ4_NL, 256, 0, 32, zero=128, wide=True),
        PackedFormat("MXFP4", MXFP4, 256, 0, 16, zero=128, wide=True),
        PackedFormat("Q4_K", Q4_K, 256, 64, 32, blocked=True, affine=True),
        PackedFormat("Q5_K", Q5_K, 320, 64, 32, blocked=True, affine=True),
        PackedFormat("IQ4_XS", IQ4_XS, 256, 64, 16, blocked=True, zero=128, wide=True),
        PackedFormat("Q6_K", Q6_K, 384, 64, 32, blocked=True, zero=32, halves=True),
        PackedFormat("Q3_K", Q3_K, 192, 64, 32, blocked=True, zero=4, halves=True),
        PackedFormat("Q2_K", Q2_K, 128, 64, 32, blocked=True, halves=True, affine=True),
        PackedFormat("F32", F32, 2048, 0, 0),
        PackedFormat("F16", F16, 1024, 0, 0),
        PackedFormat("BF16", BF16, 1024, 0, 0),
    )
}
FORMAT_OF_KIND = tuple(PACKED.values())
FLOAT_KINDS = (F32, F16, BF16)

# The sixteen values of the two table formats, both from the format's specification.
IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value: E2M1 has halves


def table_of_kind(kind: int) -> np.ndarray:
    """Values of the 16 codes of a table format, int8 [16]."""
    return np.array(MXFP4_TABLE if kind == MXFP4 else IQ4_TABLE, np.int8)
