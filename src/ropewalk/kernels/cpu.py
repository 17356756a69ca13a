"""What this CPU may run: features, and the rung of the ladder that the integer dot product stands on.

    amx       AMX int8         many tokens: one instruction multiplies tiles of 16 x 32 and 32 x 16 bytes; few: as vnni
    vnni      AVX-512 VNNI     one instruction multiplies 64 bytes and adds them in fours
    avxvnni   AVX-VNNI         the same on 32 bytes
    avx2      AVX2             two instructions and an addition on 32 bytes
    i8mm      ARM, Int8 MatMul one instruction multiplies 16 bytes, unsigned by signed, and adds them in fours
    dotprod   ARM, DotProd     the same, signed by signed: three for formats that use all eight bits
    portable  anything         plain vector arithmetic, which LLVM lowers for any CPU

All rungs give the same bits, since an integer sum is exact. ROPEWALK_RUNG forces one. Numba's own
NUMBA_CPU_NAME and NUMBA_CPU_FEATURES are honoured, because they decide what LLVM may emit.
Knows nothing of models or arrays.
"""

import logging
import os
import platform
from dataclasses import dataclass
from functools import cache
from multiprocessing import parent_process

import llvmlite.binding as llvm

from ropewalk.errors import InvalidParameterError

log = logging.getLogger("ropewalk")

_AVX2, _VNNI = {"avx2", "f16c"}, {"avx512vnni", "avx512bw", "f16c"}
_NEEDS = {  # LLVM's names of features
    "amx": {"amx-tile", "amx-int8"} | _VNNI,
    "vnni": _VNNI,
    "avxvnni": {"avxvnni"} | _AVX2,
    "avx2": _AVX2,
    "i8mm": {"i8mm"},
    "dotprod": {"dotprod"},
    "portable": set(),
}
RUNGS = tuple(_NEEDS)

# What LLVM takes for granted of a CPU of this name. For x86 only those that people test with; others are portable.
_WITH_AMX = ("sapphirerapids", "emeraldrapids", "graniterapids")
_NAMED_CPUS = {
    "amx": _WITH_AMX,
    "vnni": ("cascadelake", "icelake-client", "icelake-server", *_WITH_AMX, "znver4", "znver5"),
    "avxvnni": ("alderlake", "raptorlake", "meteorlake", "arrowlake", "sierraforest"),
    "avx2": ("haswell", "broadwell", "skylake", "skylake-avx512", "znver1", "znver2", "znver3", "x86-64-v3"),
    "i8mm": ("neoverse-v1", "neoverse-n2", "neoverse-v2", "ampere1", "apple-m2", "apple-m3", "apple-m4"),
    "dotprod": ("neoverse-n1", "cortex-a55", "cortex-a76", "apple-m1"),
}
_ARM_CPUS = _NAMED_CPUS["i8mm"] + _NAMED_CPUS["dotprod"]
_ALSO_THERE = {"vnni": {"avx512f", "avx2", "fma"}, "avxvnni": {"fma"}, "avx2": {"fma"}, "i8mm": {"dotprod"}}


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
    known = {f[1:] for f in features.split(",") if f.startswith("+")}
    is_named = os.environ.get("NUMBA_CPU_NAME") not in (None, "host", "")
    if is_named or name in _ARM_CPUS:  # Apple's CPUs tell their name and no features
        for rung, names in _NAMED_CPUS.items():
            if name in names:
                known |= _NEEDS[rung] | _ALSO_THERE.get(rung, set())
    return frozenset(known - {f[1:] for f in features.split(",") if f.startswith("-")})


def refusal(rung: str) -> str | None:
    """Why code of `rung` cannot run here, for people; None where it can."""
    missing = _NEEDS[rung] - cpu_features()
    if missing:
        return f"the CPU lacks {', '.join(sorted(missing))}"
    if rung == "amx":
        # It needs the folder of kernels, which needs this module.
        from ropewalk.kernels.amx_check import amx_refusal

        return amx_refusal()
    return None


@cache
def choose_rung() -> Rung:
    """The best rung that the target CPU allows, or the one that ROPEWALK_RUNG names.

    Raises
    ------
    InvalidParameterError
        ROPEWALK_RUNG names no rung, or one that cannot be used here.
    """
    forced = os.environ.get("ROPEWALK_RUNG")
    if forced:
        _check_forced(forced)
        return Rung(forced, "ROPEWALK_RUNG names it")
    name, _ = cpu_identity()
    reason = f"the best that {name} ({platform.machine()}) allows"
    if _NEEDS["amx"] <= cpu_features() and (refused := refusal("amx")):
        if parent_process() is None:  # those that compile ahead need not repeat it
            log.warning("AMX tiles are not used: %s (ROPEWALK_RUNG=vnni stops asking)", refused)
        reason += f" without AMX: {refused}"
    return Rung(next(rung for rung in RUNGS if refusal(rung) is None), reason)


def _check_forced(rung: str) -> None:
    if rung not in RUNGS:
        raise InvalidParameterError(f"ROPEWALK_RUNG is {rung!r}; allowed: {', '.join(RUNGS)}")
    if refused := refusal(rung):
        usable = ", ".join(name for name in RUNGS if refusal(name) is None)
        raise InvalidParameterError(
            f"ROPEWALK_RUNG is {rung!r}, which cannot be used: {refused}; usable here: {usable}"
        )


def has_native_half() -> bool:
    """Whether the target CPU converts float16 in registers; otherwise it is done with integer arithmetic."""
    return "f16c" in cpu_features() or platform.machine() in ("aarch64", "arm64")
