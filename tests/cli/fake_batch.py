"""The command line with a toy model that takes its time, for tests of `ropewalk batch` in a process of its own."""

import runpy
import time
from pathlib import Path

from ropewalk.cli import batch, main

_TOYS = runpy.run_path(str(Path(__file__).parents[1] / "toy_llm.py"))


class Slow(_TOYS["ToyBackend"]):
    def forward(self, tokens, cache):
        time.sleep(0.003)
        return super().forward(tokens, cache)


batch.open_llm = lambda model, machine, *, max_batch: _TOYS["toy_llm"](Slow(), max_batch=max_batch)
main()
