"""A machine as planning sees it: bytes of memory, bytes a second, operations a second by type.

Knows nothing of models. The table of named ones is `ropewalk.plan.machines`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ropewalk.errors import InvalidParameterError

ARITHMETIC_TYPES = ("float32", "float16", "float8", "int8")


@dataclass(frozen=True)
class Machine:
    """What bounds a step.

    Attributes
    ----------
    name : str
    memory_bytes : int or None
        None where it is not known, so that nothing can be said about what fits.
    bandwidth : float
        Bytes a second that it reads from that memory.
    rates : mapping of str to float
        Operations a second by type of arithmetic (`ARITHMETIC_TYPES`); "any" holds for all types; empty: not known.
    source : str
        Where the numbers are from.
    """

    name: str
    memory_bytes: int | None
    bandwidth: float
    rates: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise InvalidParameterError(f"memory is {self.memory_bytes}; allowed: more than 0 bytes")
        if self.bandwidth <= 0:
            raise InvalidParameterError(f"bandwidth is {self.bandwidth}; allowed: more than 0 bytes a second")

    def rate_for(self, weight_type: str) -> tuple[float | None, str]:
        """Operations a second for weights of a type, and in which arithmetic; None where it is not known.

        Weights of 8 bits or fewer that the machine cannot multiply as they are become 16-bit numbers first, and where
        there is no 16-bit arithmetic, 32-bit ones.
        """
        wanted = _ARITHMETIC.get(weight_type, "float16")
        for kind in ("any", wanted, "float16", "float32"):
            if kind in self.rates:
                return self.rates[kind], kind
        return None, "unknown"

    def with_limits(
        self,
        *,
        memory_bytes: int | None = None,
        bandwidth: float | None = None,
        rate: float | None = None,
    ) -> Machine:
        """The same machine with some of its numbers replaced."""
        changed = replace(
            self,
            memory_bytes=self.memory_bytes if memory_bytes is None else memory_bytes,
            bandwidth=self.bandwidth if bandwidth is None else bandwidth,
            rates=self.rates if rate is None else {"any": rate},
        )
        return changed if changed == self else replace(changed, name=f"{self.name}, changed")


_ARITHMETIC = {"F32": "float32", "FP8": "float8", "INT8": "int8"}


def find_machine(name: str) -> Machine:
    """The named machine, whatever its letters' case and separators.

    Raises
    ------
    InvalidParameterError
        There is none, or several that begin so; near matches are suggested.
    """
    from ropewalk.plan.machines import MACHINES

    keys = {_key(full): machine for full, machine in MACHINES.items()}
    keys |= {_key(re.sub(r" \(.*", "", full)): machine for full, machine in MACHINES.items()}
    wanted = _key(name)
    if wanted in keys:
        return keys[wanted]
    found = {machine.name: machine for key, machine in keys.items() if wanted and wanted in key}
    if len(found) == 1:
        return next(iter(found.values()))
    near = list(found) or [keys[key].name for key in difflib.get_close_matches(wanted, keys, 3, 0.5)]
    near = list(dict.fromkeys(near))
    raise InvalidParameterError(
        f"machine {name!r} is {'ambiguous' if found else 'unknown'}; "
        + (f"did you mean {' or '.join(near[:5])}? " if near else "")
        + "known: "
        + ", ".join(MACHINES)
    )


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", name.lower())
