"""A real generation, told: every step beside what the machine's memory allows, and every draw.

The bound is measured with the model's own weights, read by as many threads and for nothing else
(`CpuBackend.read_bandwidth`): before the first step, after the last one, and now and then between them, because on a
shared machine it changes from second to second. A step is compared with the best of the sweeps around it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from ropewalk.backend.base import PAGE_SIZE, now_ns
from ropewalk.engine.trace import Trace, added
from ropewalk.errors import GenerationError
from ropewalk.outputs import RequestOutput
from ropewalk.params import SamplingParams

if TYPE_CHECKING:
    from ropewalk.llm import LLM
    from ropewalk.prompts import Prompt
    from ropewalk.truncation import Conversation

N_SWEEPS = 3
PAUSE_S = 0.1  # between sweeps, at least; and twice as long as they took
NEAR = 2  # measurements on either side of a step that count


@dataclass(frozen=True)
class Sweep:
    """A measurement of the bound: when, on the clock of the trace, and bytes per second."""

    at_ns: int
    bytes_per_s: float


@dataclass(frozen=True)
class Story:
    """What `explain` found.

    Attributes
    ----------
    output : RequestOutput
        With its trace.
    params : SamplingParams
    model, machine : dict
        Facts that the figures hold for, as JSON values.
    sweeps : tuple of Sweep
        How fast the weights could be read, in order of time; at least one.
    """

    output: RequestOutput
    params: SamplingParams
    model: dict[str, Any]
    machine: dict[str, Any]
    sweeps: tuple[Sweep, ...]

    @property
    def trace(self) -> Trace:
        """The trace of the output."""
        assert self.output.trace is not None
        return self.output.trace

    @property
    def bounds(self) -> list[float]:
        """For each step, the best of the sweeps near it, in bytes per second."""
        times = [sweep.at_ns for sweep in self.sweeps]
        places = [bisect_left(times, step.start_ns) for step in self.trace.steps]
        return [max(s.bytes_per_s for s in self.sweeps[max(0, i - NEAR) : i + NEAR]) for i in places]

    @property
    def shares(self) -> list[float]:
        """For each step, the share of the bound that it reached: bytes read, over its time, over the bound."""
        return [step.bytes_per_s / bound for step, bound in zip(self.trace.steps, self.bounds, strict=True)]

    def phase(self, name: str) -> dict[str, float]:
        """Totals of the steps of "prefill" or "decode"; medians where steps are compared. Empty if there are none."""
        of_phase = [
            (step, share)
            for step, share in zip(self.trace.steps, self.shares, strict=True)
            if step.phase == name
        ]
        if not of_phase:
            return {}
        steps = [step for step, _ in of_phase]
        seconds = sum(step.seconds for step in steps)
        return {
            "steps": len(steps),
            "tokens": sum(step.n_tokens for step in steps),
            "seconds": seconds,
            "tokens_per_s": sum(step.n_tokens for step in steps) / seconds,
            "read_bytes": sum(step.read_bytes for step in steps),
            "step_s": median(step.seconds for step in steps),
            "bytes_per_s": median(step.bytes_per_s for step in steps),
            "bound_share": median(share for _, share in of_phase),
        }

    def part_s(self, phase: str) -> dict[str, float]:
        """Seconds of each part in the steps of a phase, without the making of the trace."""
        totals = added(step.part_s for step in self.trace.steps if step.phase == phase)
        return {part: seconds for part, seconds in totals.items() if part != "trace"}

    def wait_s(self, phase: str) -> dict[str, float]:
        """What of the waiting in the steps of a phase came after each part."""
        return added(step.wait_s for step in self.trace.steps if step.phase == phase)

    def to_dict(self, llm: LLM) -> dict[str, Any]:
        """All of it as JSON values, with the texts of tokens."""
        found = self.trace.to_dict(lambda token: llm.decode([token], skip_special=False))
        for step, share, bound in zip(found["steps"], self.shares, self.bounds, strict=True):
            step |= {"bound_bytes_per_s": bound, "bound_share": share}
        return {
            "model": self.model,
            "machine": self.machine,
            "read_bandwidth_bytes_per_s": [sweep.bytes_per_s for sweep in self.sweeps],
            "prompt": self.output.prompt,
            "prompt_token_ids": self.output.prompt_token_ids,
            "text": self.output.text,
            "token_ids": self.output.token_ids,
            "finish_reason": self.output.finish_reason,
            "seed": self.output.seed,
            "prefill": self.phase("prefill"),
            "decode": self.phase("decode"),
            **found,
        }


def explain(llm: LLM, prompt: Prompt | Conversation, params: SamplingParams) -> Story:
    """Run one generation and tell how it went.

    Parameters
    ----------
    llm : LLM
        With nothing else to do meanwhile.
    prompt : str or token ids, or a conversation
        As `LLM.stream` or, if it is a sequence of mappings, `LLM.stream_chat` take it.
    params : SamplingParams
        With `n` = 1; `trace` (here 5, if it is None) says how many of the most likely tokens are told.

    Raises
    ------
    PromptError, InvalidParameterError, TemplateError
        As `LLM.stream_chat`.
    GenerationError
        If the generation fails.
    """
    params = replace(params, n=1, trace=5 if params.trace is None else params.trace)
    is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    stream: Any = llm.stream_chat if is_chat else llm.stream
    chunks = stream(prompt, params)
    sweeps = [measured(llm)]
    output, due_ns = None, 0
    for chunk in chunks:
        output = chunk.output
        if output is not None or now_ns() >= due_ns:
            began_ns = now_ns()
            sweeps.append(measured(llm))
            took_s = (now_ns() - began_ns) / 1e9
            due_ns = now_ns() + int(1e9 * max(PAUSE_S, 2 * took_s))
    if output is None:
        raise GenerationError("the generation ended without an output")
    return Story(output, params, model_facts(llm, output.trace), machine_facts(llm), tuple(sweeps))


def measured(llm: LLM) -> Sweep:
    """How fast the weights can be read just now."""
    backend: Any = llm.backend
    at_ns = now_ns()
    return Sweep(at_ns, float(backend.read_bandwidth(N_SWEEPS)))


def model_facts(llm: LLM, trace: Trace | None) -> dict[str, Any]:
    """What the model is, and what its weights and a token of its cache take."""
    config = llm.config
    backend: Any = llm.backend
    page_bytes = trace.steps[0].page_bytes if trace and trace.steps else 0
    return {
        "name": config.name,
        "architecture": config.architecture,
        "layers": config.n_layers,
        "heads": config.n_heads,
        "kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "weight_bytes": int(backend.weights.n_bytes),
        "cache_page_bytes": page_bytes,
        "cache_token_bytes": page_bytes // PAGE_SIZE,
        "page_tokens": PAGE_SIZE,
    }


def machine_facts(llm: LLM) -> dict[str, Any]:
    """What computed."""
    from ropewalk import __version__
    from ropewalk.kernels.cpu import choose_rung, cpu_identity

    backend: Any = llm.backend
    return {
        "cpu": cpu_identity()[0],
        "kernels": choose_rung().name,
        "threads": backend.n_threads,
        "version": __version__,
    }
