"""The loop with its KV cache and without: time of each token, and of all tokens so far, from a real run.

With the cache n tokens cost n passes of a token; without it, 1 + 2 + ... + n = n (n + 1) / 2. Both ways give the same
tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from ropewalk.errors import GenerationError, InvalidParameterError
from ropewalk.figures.style import LINES, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ropewalk.llm import LLM


@dataclass(frozen=True)
class Loop:
    """Median seconds of each token, from the first, with the cache and without; the tokens, the same both ways."""

    with_cache: tuple[float, ...]
    without: tuple[float, ...]
    token_ids: tuple[int, ...]

    @property
    def passes(self) -> tuple[int, int]:
        """Tokens that went through the model in all, with the cache and without, for a prompt of one token."""
        n = len(self.token_ids)
        return n, n * (n + 1) // 2


def measure(
    model: str | PathLike[str],
    n_tokens: int,
    repeats: int = 1,
    *,
    progress: Callable[[str, float], None] = lambda what, share: None,
    **options: Any,
) -> Loop:
    """Generate greedily from one token, both ways in turns.

    Parameters
    ----------
    model : str or path
        As `LLM` takes it.
    n_tokens : int
        At least 2.
    repeats : int
        Runs of each way; a token's time is the median of them.
    progress : callable (what, share)
    options
        Of `LLM`.

    Raises
    ------
    InvalidParameterError
        A number that is too small.
    GenerationError
        The two ways gave different tokens.
    """
    from ropewalk.llm import LLM

    for name, value, least in (("n_tokens", n_tokens, 2), ("repeats", repeats, 1)):
        if value < least:
            raise InvalidParameterError(f"{name} is {value}; allowed: at least {least}")
    rounds: tuple[list[list[float]], list[list[float]]] = ([], [])
    tokens: list[int] = []
    with ExitStack() as stack:
        llms = [
            stack.enter_context(
                LLM(model, context_length=n_tokens + 1, max_batch=1, kv_cache=kept, **options)
            )
            for kept in (True, False)
        ]
        prompt = llms[0].encode("Once")[-1:]
        for llm in llms:
            timed(llm, prompt, min(8, n_tokens))  # warm
        for number in range(repeats):
            progress("generating with the KV cache and without", number / repeats)
            runs = [timed(llm, prompt, n_tokens) for llm in llms]
            if runs[0][0] != runs[1][0]:
                raise GenerationError(
                    f"with and without the KV cache the tokens differ: {runs[0][0]}, {runs[1][0]}"
                )
            tokens = runs[0][0]
            for times, run in zip(rounds, runs, strict=True):
                times.append(run[1])
    with_cache, without = (tuple(map(statistics.median, zip(*times, strict=True))) for times in rounds)
    return Loop(with_cache, without, tuple(tokens))


def timed(llm: LLM, prompt: list[int], n_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens, and the seconds that each took."""
    from ropewalk.params import SamplingParams

    tokens, times = [], []
    last = time.perf_counter()
    for chunk in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)):
        now = time.perf_counter()
        tokens.append(chunk.token_id)
        times.append(now - last)
        last = now
    return tokens, times


def draw(loop: Loop, name: str, *, machine: str = "", theme: str = "light") -> Figure:
    """Draw both panels.

    Parameters
    ----------
    loop : Loop
        Of `measure`.
    name : str
        Of the model.
    machine : str
        What it ran on.
    theme : "light", "dark" or "auto"
    """
    n = np.arange(1, len(loop.token_ids) + 1)
    kept, passes = loop.passes
    ways = (
        ("with the KV cache", loop.with_cache, f"{kept:,} passes of a token"),
        ("without", loop.without, f"{passes:,} passes"),
    )
    with canvas(theme, 9.6, 3.9) as (figure, colours):
        left, right = figure.subplots(1, 2)
        for i, (what, seconds, cost) in enumerate(ways):
            look: dict[str, Any] = {"color": colours.series[i], "linestyle": LINES[i]}
            left.plot(n, 1e3 * np.array(seconds), **look, label=what)
            right.plot(n, np.cumsum(seconds), **look, label=f"{what}: {cost}")
        left.set_ylabel("time of the n-th token, ms")
        left.set_title(f"One token: {name}")
        right.set_ylabel("time of n tokens, s")
        right.set_title("All tokens so far")
        for axes in (left, right):
            axes.set_xlabel("n, tokens")
            axes.set_xlim(0, len(n))
            axes.set_ylim(bottom=0)
            axes.legend(loc="upper left")
        if machine:
            figure.suptitle(f"measured on {machine}", x=0.01, ha="left", fontsize=10, color=colours.muted)
        return figure
