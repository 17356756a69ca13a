"""The rotation of `pointwise` by itself, as every query and key of the forward pass meets it: for `verify rope`."""

import numpy as np

from ropewalk.kernels.jit import kernel
from ropewalk.kernels.pointwise import rotate


@kernel
def _rotate_rows(x, n_rows, row_bytes, cos, sin, angle_bytes, width, neighbours):
    for row in range(n_rows):
        rotate(x + row_bytes * row, cos + angle_bytes * row, sin + angle_bytes * row, width, neighbours != 0)


def rotate_rows(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, neighbours: bool) -> np.ndarray:
    """Rotate the first dimensions of each row by its own angles, as the forward pass does.

    Parameters
    ----------
    x : float32 [n, head_dim]
    cos, sin : float32 [n, width / 2]
    neighbours : bool
        Whether dimensions (2i, 2i + 1) turn together; else (i, i + width / 2).

    Returns
    -------
    float32 [n, head_dim]
    """
    out, cos, sin = np.array(x, np.float32), np.ascontiguousarray(cos), np.ascontiguousarray(sin)
    if cos.dtype != np.float32 or cos.shape != sin.shape or len(cos) != len(out) or sin.dtype != np.float32:
        raise ValueError(f"cos and sin must be float32 [{len(out)}, width / 2], not {cos.dtype} {cos.shape}")
    width = 2 * cos.shape[1]
    _rotate_rows(
        out.ctypes.data,
        len(out),
        out.strides[0],
        cos.ctypes.data,
        sin.ctypes.data,
        cos.strides[0],
        width,
        int(neighbours),
    )
    return out
