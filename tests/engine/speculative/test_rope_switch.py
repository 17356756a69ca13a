"""Drafts beside a rotary list that follows the length: no guess is checked with another list than it is drawn (B8)."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from ropewalk.engine.engine import Engine
from ropewalk.params import SamplingParams

ToyBackend = runpy.run_path(str(Path(__file__).parents[1] / "toy.py"))["ToyBackend"]
SWITCH = 20


def alone(prompt, n):
    """Greedy tokens by the definition: the list follows the number of known tokens."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(np.argmax(ToyBackend().logits(tokens, long=len(tokens) > SWITCH))))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("length", [10, 17, 19, 20, 21])
@pytest.mark.parametrize("drafter", ["truth", "same", "lookup"])
def test_drafted_tokens_are_those_of_the_definition_h1_b8(speculator, drafter, length):
    prompt = [i * 5 % 13 for i in range(length)]
    expected = alone(prompt, 25)

    def truth(request, most):
        return expected[request.n_output : request.n_output + most]

    guesses = speculator(truth if drafter == "truth" else drafter, most=6)
    engine = Engine(
        ToyBackend(rope_switch=SWITCH),
        context_length=64,
        kv_tokens=128,
        speculator=guesses,
    )
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    requests = [engine.add_request(prompt, params), engine.add_request(prompt[:5], params)]
    lengths = []
    while engine.has_unfinished:
        engine.step()
        engine.check()
        lengths.append(requests[0].n_tokens)
    assert requests[0].output == expected
    if drafter == "truth":
        assert requests[0].n_accepted > 10
        assert SWITCH + 1 in lengths or length > SWITCH  # a step ends there, whatever was guessed
    assert requests[1].output == alone(prompt[:5], 25)
