"""Figures of the theory and of real runs, as functions that return a matplotlib `Figure`.

    from ropewalk import figures

    figures.cache.draw()                 # KV cache against context: grouped and full attention, weights, memories
    figures.rope.draw()                  # scores against position; wavelengths of the pairs
    figures.sampling.draw()              # a distribution before and after temperature and top-p
    figures.roofline.draw(points, ...)   # measured steps of a model under the machine's roof
    figures.loop.draw(loop)              # n tokens with the KV cache and without

Each module computes its numbers apart from drawing them, so that they can be tested and printed. Needs matplotlib,
the extra `plots`; nothing imports it before a figure is drawn.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

NAMES = ("cache", "rope", "sampling", "roofline", "loop")


def __getattr__(name: str) -> ModuleType:
    if name in NAMES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
