"""What the arithmetic is, as a hash: the same on the same sources, libraries and CPU, and nowhere else.

The kernels promise the same bits on every CPU, but what is kept on disk for months must not rest on a promise: keys and
values that were written by other sources, another NumPy or another CPU are never read again.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import numpy as np

from ropewalk.kernels.cache import source_hash

ROOMS = ("backend", "checkpoint", "model")
"""Folders whose code, besides the kernels', takes part in what a key or a value is."""


@cache
def numerics_hash() -> str:
    """Return the hash, in hexadecimal."""
    digest = hashlib.sha256(f"{source_hash()} {np.__version__}".encode())
    package = Path(__file__).parent.parent
    for room in ROOMS:
        for path in sorted((package / room).glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
