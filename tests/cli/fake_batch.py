"""The command line with a toy model, for tests of `ropewalk batch` in a process of its own.

From step SLOW_AFTER on a step takes half a second, so that whoever stops the process finds it at work.
"""

import os
import runpy
import time
from pathlib import Path

from ropewalk.cli import batch, main

_TOYS = runpy.run_path(str(Path(__file__).parents[1] / "toy_llm.py"))


class Slow(_TOYS["ToyBackend"]):
    def forward(self, tokens, cache):
        if len(self.batch_sizes) >= int(os.environ.get("SLOW_AFTER", "1000000")):
            time.sleep(0.5)
        return super().forward(tokens, cache)


batch.open_llm = lambda model, machine, *, max_batch: _TOYS["toy_llm"](Slow(), max_batch=max_batch)
main()
