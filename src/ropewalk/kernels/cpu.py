"""What this CPU may run: features, and the rung of the ladder that the integer dot product stands on.

    vnni      AVX-512 VNNI     one instruction multiplies 64 bytes and adds them in fours
    avxvnni   AVX-VNNI         the same on 32 bytes
    avx2      AVX2             two instructions and an addition on 32 bytes
    portable  anything         plain vector arithmetic, which LLVM lowers for any CPU (also ARM)

All rungs give the same bits, since an integer sum is exact. ROPEWALK_RUNG forces one. Numba's own
NUMBA_CPU_NAME and NUMBA_CPU_FEATURES are honoured, because they decide what LLVM may emit.
Knows nothing of models or arrays.
"""

import os
import platform
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm

from ropewalk.errors import InvalidParameterError

RUNGS = ("vnni", "avxvnni", "avx2", "portable")

# What LLVM may assume when NUMBA_CPU_NAME names a CPU: only those that people test with. Others are portable.
_NAMED_CPUS = {
    "vnni": ("cascadelake", "icelake-client", "icelake-server", "sapphirerapids", "znver4", "znver5"),
    "avxvnni": ("alderlake", "raptorlake", "meteorlake", "arrowlake", "sierraforest"),
    "avx2": ("haswell", "broadwell", "skylake", "skylake-avx512", "znver1", "znver2", "znver3", "x86-64-v3"),
}


@dataclass(frozen=True)
class Rung:
    """A rung of the ladder (`name`) and, for people, why it was chosen (`reason`)."""

    name: str
    reason: str

    @property
    def vectors(self) -> str:
        """The rung that this one's vector instructions are of."""
        return "vnni" if self.name == "amx" else self.name


def cpu_identity() -> tuple[str, str]:
    """The CPU name and feature string that Numba compiles for."""
    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = "" if os.environ.get("NUMBA_CPU_NAME") else llvm.get_host_cpu_features().flatten()
    return name, features


def cpu_features() -> frozenset[str]:
    """LLVM's names of the features that the target CPU has, as far as they are known."""
    name, features = cpu_identity()
    if os.environ.get("NUMBA_CPU_NAME") in (None, "host", ""):
        return frozenset(f[1:] for f in features.split(",") if f.startswith("+"))
    known = {f[1:] for f in features.split(",") if f.startswith("+")}
    if name in _NAMED_CPUS["vnni"]:
        known |= {"avx512vnni", "avx512f", "avx512bw", "avx2", "f16c", "fma"}
    if name in _NAMED_CPUS["avxvnni"]:
        known |= {"avxvnni", "avx2", "f16c", "fma"}
    if name in _NAMED_CPUS["avx2"]:
        known |= {"avx2", "f16c", "fma"}
    return frozenset(known - {f[1:] for f in features.split(",") if f.startswith("-")})


def is_usable(rung: str, features: frozenset[str]) -> bool:
    """Whether code of `rung` runs on a CPU with `features`."""
    return {
        "vnni": {"avx512vnni", "avx512bw", "f16c"} <= features,
        "avxvnni": {"avxvnni", "avx2", "f16c"} <= features,
        "avx2": {"avx2", "f16c"} <= features,
        "portable": True,
    }[rung]


@cache
def choose_rung() -> Rung:
    """The best rung that the target CPU allows, or the one that ROPEWALK_RUNG names.

    Raises
    ------
    InvalidParameterError
        ROPEWALK_RUNG names no rung, or one that this CPU cannot run.
    """
    features = cpu_features()
    usable = [rung for rung in RUNGS if is_usable(rung, features)]
    forced = os.environ.get("ROPEWALK_RUNG")
    if forced:
        if forced not in RUNGS:
            raise InvalidParameterError(f"ROPEWALK_RUNG is {forced!r}; allowed: {', '.join(RUNGS)}")
        if forced not in usable:
            raise InvalidParameterError(
                f"ROPEWALK_RUNG is {forced!r}, which this CPU cannot run; usable here: {', '.join(usable)}"
            )
        return Rung(forced, "ROPEWALK_RUNG names it")
    name, _ = cpu_identity()
    return Rung(usable[0], f"the best that {name} ({platform.machine()}) allows")


def has_native_half() -> bool:
    """Whether the target CPU converts float16 in registers; otherwise it is done with integer arithmetic."""
    return "f16c" in cpu_features() or platform.machine() in ("aarch64", "arm64")
