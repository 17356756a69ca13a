"""The measured rate of arithmetic is that of a product which really runs, and of so many operations."""

from types import SimpleNamespace

import numpy as np

from ropewalk.kernels import arithmetic
from ropewalk.kernels.arithmetic import COLUMNS, PANELS, measure_arithmetic
from ropewalk.kernels.matmul import max_tile


def test_a_run_writes_every_product_that_is_counted():
    work = arithmetic._Work()
    work._out[:] = np.nan
    work.run(2)
    assert (work._out == 0).all()  # weights and activations are zeros
    assert work.operations == 2 * work._out.size * COLUMNS == 2 * 16 * PANELS * max_tile() * COLUMNS


def test_every_thread_counts(monkeypatch):
    """A clock that advances by one second a look: operations of all threads over one round."""
    monkeypatch.setattr(arithmetic, "time", SimpleNamespace(perf_counter=iter(range(100)).__next__))
    seen = []
    monkeypatch.setattr(arithmetic._Work, "run", lambda self, times: seen.append(times))
    rate = measure_arithmetic(3, seconds=0.5, repeats=2)
    assert seen == [1, 100] + [50] * 6
    assert rate == 3 * 50 * arithmetic._Work().operations
