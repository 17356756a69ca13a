"""Draft models over the toy model, and drafters that guess as they are told."""

import itertools
import runpy
from pathlib import Path

import pytest

from ropewalk.engine.speculative.lookup import PromptLookup
from ropewalk.engine.speculative.model import DraftModel
from ropewalk.engine.speculative.pace import AdaptivePace, Pace
from ropewalk.engine.speculative.speculator import Speculator

ToyBackend = runpy.run_path(str(Path(__file__).parents[1] / "toy.py"))["ToyBackend"]


class Random(ToyBackend):
    """Another model: right by chance only."""

    def logits(self, tokens):
        return super().logits([*tokens, 5, 7])


class Sometimes(ToyBackend):
    """Often the model itself, else another: runs of guesses break off anywhere."""

    def logits(self, tokens):
        return super().logits([*tokens, 5, 7] if sum(tokens) % 4 == 0 else tokens)


MODELS = {"same": ToyBackend, "random": Random, "sometimes": Sometimes}


class Watching(Pace):
    """Drafts all it can, and remembers which guesses were right."""

    def __init__(self):
        self.right = []

    def observe(self, draft, right):
        self.right += right


class Timed(AdaptivePace):
    """Adapts to steps that take one unit and a tenth for each token, so that nothing depends on the machine."""

    def measured(self, n_tokens, seconds):
        super().measured(n_tokens, 1 + 0.1 * n_tokens)


def clock():
    """A clock that advances by a tenth whenever it is read."""
    return (n / 10 for n in itertools.count()).__next__


class Oracle(PromptLookup):
    """Guesses from a function of the request and the number of guesses; knows no vocabulary but the toy's."""

    def __init__(self, guesses):
        self.guesses = guesses

    def draft(self, drafts, step, pace):
        for draft in drafts:
            for token in self.guesses(draft.request, draft.most):
                draft.add(token, 1)


@pytest.fixture(scope="session")
def speculator():
    """A function from a drafter's name (or guesses) and a number of guesses to a `Speculator`."""

    def make(name, most=4, adaptive=False):
        if name == "lookup":
            drafter = PromptLookup()
        elif callable(name):
            drafter = Oracle(name)
        else:
            drafter = DraftModel(MODELS[name](), 13, clock=clock())
        return Speculator(drafter, most, Timed(drafter.priors) if adaptive else Watching())

    return make
