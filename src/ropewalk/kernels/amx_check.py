"""Whether AMX tiles may be used in this process: the CPU has them, Linux allows them, and they compute exactly.

An instruction that is announced and then refused ends a process, so nobody is asked in this one: a child multiplies
small integers with the very code that models use and compares every bit. Its verdict is kept in the folder of compiled
kernels that it is about (`kernels.cache`), so that a later start costs a system call and a look at a file. A bad
verdict is believed for a day: it may have been a machine that was too busy.

    python -c "from ropewalk.kernels.amx_check import main; main()"        what the child does
"""

import contextlib
import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np

from ropewalk.kernels import formats as F
from ropewalk.kernels.cache import cache_folder

FEATURES = ("amx-tile", "amx-int8")
PASSED = "AMX computes exactly"
TIMEOUT_S = 600
"""Compiling for the child takes a quiet machine 20 seconds, and a crowded one ten times as long."""
BELIEVED_S = 24 * 3600

# Linux: Documentation/arch/x86/xstate.rst. The tiles are state component 18.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILE_DATA = 158, 0x1023, 18


@cache
def amx_refusal() -> str | None:
    """Why tiles cannot be used here, for people; None if they can, and from then on this process may use them."""
    if not host_has_amx():
        return "this machine's CPU has no AMX"
    return permission_refusal() or _verdict()


def host_has_amx() -> bool:
    """Whether LLVM sees the tiles on this CPU, and enabled by the system."""
    features = llvm.get_host_cpu_features()
    return all(features.get(name, False) for name in FEATURES)


def permission_refusal() -> str | None:
    """Ask Linux for the tiles' state, for all threads of this process and its forks; None if it is given."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"only asked for on x86-64 Linux, and this is {sys.platform} {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILE_DATA) == 0:
        return None
    return f"Linux refuses the tiles' state ({os.strerror(ctypes.get_errno())})"


def _verdict() -> str | None:
    """What the child found, now or earlier."""
    path = cache_folder("amx") / "amx-check.txt"
    with contextlib.suppress(OSError):
        text = path.read_text()
        if text == PASSED or (text and time.time() - path.stat().st_mtime < BELIEVED_S):
            return None if text == PASSED else text
    text = _ask_child() or PASSED
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:  # asked again next time
        with contextlib.suppress(OSError):
            temporary.unlink()
    return None if text == PASSED else text


def _command() -> list[str]:
    return [sys.executable, "-P", "-c", "from ropewalk.kernels.amx_check import main; main()"]


def _ask_child() -> str | None:
    """Why the child did not find what it should; None if it did."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"ROPEWALK_RUNG": "vnni", "PYTHONPATH": path}
    try:
        child = subprocess.run(
            _command(),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"its self-check had not ended after {TIMEOUT_S} s"
    except OSError as error:
        return f"its self-check could not be started: {error}"
    if child.returncode == 0 and child.stdout.strip() == PASSED:
        return None
    if child.returncode < 0:
        return f"its self-check was ended by {signal.Signals(-child.returncode).name}"
    lines = (child.stdout + child.stderr).strip().splitlines()
    return f"its self-check failed: {lines[-1] if lines else f'exit status {child.returncode}'}"


# ---- in the child


def main() -> None:
    """Check, say PASSED or what is wrong, and exit with 0 or 1."""
    refused = permission_refusal()
    wrong = [] if refused else [name for name, check in CHECKS.items() if not check()]
    message = refused or (f"wrong sums of {', '.join(wrong)}" if wrong else PASSED)
    print(message)
    sys.exit(message != PASSED)


def _check_bytes() -> bool:
    """Weights of 8 bits, activations of 16, an odd number of groups, 40 tokens: three blocks, the last half full."""
    rng = np.random.default_rng(0)
    q = rng.integers(-128, 128, (16, 96))
    x = rng.integers(-900, 900, (40, 96))  # so that sums are floats exactly
    panel = _panel("Q8_0", 96)
    for g in range(3):
        block = panel[544 * g : 544 * (g + 1)]
        block[:32] = np.ones(16, np.float16).view(np.uint8)
        vectors = (q[:, 32 * g : 32 * (g + 1)] + 128).astype(np.uint8).reshape(16, 8, 4)
        block[32:] = vectors.transpose(1, 0, 2).ravel()
    return _multiplies("Q8_0", panel, x, 1, x @ q.T)


def _check_halves() -> bool:
    """Weights of 2 bits with a scale for every 16 columns, activations of 8, and one block of tokens."""
    rng = np.random.default_rng(1)
    q = rng.integers(0, 4, (16, 256))
    scales = rng.integers(0, 16, (16, 16))
    x = rng.integers(-127, 128, (16, 256))
    panel = _panel("Q2_K", 256)
    panel[:32] = np.ones(16, np.float16).view(np.uint8)
    panel[64:320] = scales.T.ravel()
    vectors = q.reshape(16, 8, 2, 4, 4).transpose(1, 2, 3, 0, 4).reshape(8, 2, 4, 64)
    shifted = vectors << (2 * np.arange(4))[:, None]
    panel[320:] = shifted.sum(2).astype(np.uint8).ravel()
    return _multiplies("Q2_K", panel, x, 0, x @ (q * np.repeat(scales, 16, 1)).T)


CHECKS = {"bytes": _check_bytes, "halves": _check_halves}


def _panel(name: str, columns: int) -> np.ndarray:
    packed = F.PACKED[name]
    return np.zeros(columns // F.GROUP // packed.block_groups * packed.block_bytes, np.uint8)


def _multiplies(name: str, panel: np.ndarray, x: np.ndarray, fine: int, exact: np.ndarray) -> bool:
    """Whether the product of the panel and integers x [tokens, columns], all scales 1, has the bits of `exact`."""
    from ropewalk.kernels.amx import tile_worker
    from ropewalk.kernels.arithmetic import repeat_worker

    n_tokens, columns = x.shape
    tile = next(t for t in (16, 32, 64) if t >= n_tokens)
    padded = np.zeros((tile, columns), np.int64)
    padded[:n_tokens] = x
    parts: list[np.ndarray] = []
    for g in range(columns // F.GROUP):
        x_q = padded[:, F.GROUP * g : F.GROUP * (g + 1)]
        high = (x_q + 128) >> 8
        parts += [high.astype(np.int8), (x_q - 256 * high).astype(np.int8)] if fine else [x_q.astype(np.int8)]
        parts += [np.ones(tile, np.float32), x_q.sum(1).astype(np.float32)]
        parts += [-x_q[:, :16].sum(1, dtype=np.int32), -x_q[:, 16:].sum(1, dtype=np.int32)]
    data = np.concatenate([part.view(np.uint8).ravel() for part in parts])
    y = np.full((n_tokens, 16), np.nan, np.float32)
    where = (panel.ctypes.data, 1, panel.size, columns // F.GROUP, data.ctypes.data, y.ctypes.data)
    repeat_worker(tile_worker(F.PACKED[name].kind, fine), (*where, y.strides[0], n_tokens, 0), 1)
    return y.tobytes() == exact.astype(np.float32).tobytes()
