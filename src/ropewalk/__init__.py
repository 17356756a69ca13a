"""Ropewalk: text from language models in pure Python.

    from ropewalk import LLM, SamplingParams

    with LLM("smollm2-135m") as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=40)):
            print(output.text)

Names are imported when they are first used, so that `import ropewalk` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropewalk import errors
    from ropewalk.async_engine import AsyncEngine
    from ropewalk.engine.sampler import Logprob
    from ropewalk.llm import LLM
    from ropewalk.outputs import CompletionOutput, RequestOutput, StreamChunk, Timings
    from ropewalk.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
    "Timings",
    "__version__",
    "errors",
]

_HOMES = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "CompletionOutput": "outputs",
    "Logprob": "engine.sampler",
    "RequestOutput": "outputs",
    "SamplingParams": "params",
    "StreamChunk": "outputs",
    "Timings": "outputs",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("ropewalk.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'ropewalk' has no attribute {name!r}")
    value = getattr(import_module(f"ropewalk.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
