"""/v1/completions: prompts continued as they stand. Choices are numbered prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ropewalk.api.bodies import FINGERPRINT, CompletionBody, CompletionChoice, Event, dropped, new_id, now
from ropewalk.api.body import checked
from ropewalk.api.errors import ApiError
from ropewalk.api.logprobs import CompletionLogprobsMaker
from ropewalk.api.requests import CompletionRequest
from ropewalk.api.tasks import Find, Task, constraint_of, encoded, make_job
from ropewalk.api.traces import of_chunk, of_completion
from ropewalk.outputs import CompletionOutput, RequestOutput, StreamChunk

DEFAULT_MAX_TOKENS = 16


class CompletionTask(Task):
    """One request to /v1/completions."""

    def __init__(self, body: dict[str, Any], find: Find) -> None:
        request = checked(CompletionRequest, body)
        self.model, self.llm = find(request.model)
        self.stream, self.user = bool(request.stream), request.user
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)
        params = request.sampling_params(
            max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
            logprobs=request.logprobs,
            adapters=self.llm.adapters,
        )
        constraint = constraint_of(self.llm, request, request.response_format)
        prompts = request.prompts
        limited = request.max_tokens is not None
        may_be_cut = params.truncate_prompt_tokens is not None
        ids = [encoded(self.llm, p, may_be_cut=may_be_cut) if isinstance(p, str) else p for p in prompts]
        self.jobs = [make_job(self.llm, each, params, constraint, is_limited=limited) for each in ids]
        self._echoed = [""] * len(prompts)
        if request.echo:
            self._echoed = [
                p if isinstance(p, str) else self.llm.decode(p, skip_special=False) for p in prompts
            ]
        self._params = params
        self._makers = [self._new_maker() for _ in range(self.n_sequences)]
        self._id, self._created = new_id("cmpl-"), now()

    def body(self, outputs: Sequence[RequestOutput]) -> CompletionBody:
        """The whole answer."""
        choices = [
            self._choice(job, completion)
            for job, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return {**self._frame(), "choices": choices, "usage": self.usage(outputs)}

    def _choice(self, job: int, completion: CompletionOutput) -> CompletionChoice:
        logprobs = completion.logprobs
        return {
            "index": self._index(job, completion.index),
            "text": self._echoed[job] + completion.text,
            "logprobs": None if logprobs is None else self._new_maker().of(self._shown(logprobs)),
            "finish_reason": "length" if completion.finish_reason == "length" else "stop",
            "seed": completion.seed,
            **dropped(completion, self._params),  # type: ignore[typeddict-item]
            **of_completion(completion, self.llm.tokenizer),
        }

    def start(self) -> list[Event]:
        """The prompts, if they are to be repeated."""
        n = self._params.n
        return [self._chunk(i, self._echoed[i // n]) for i in range(self.n_sequences) if self._echoed[i // n]]

    def take(self, job: int, chunk: StreamChunk) -> list[Event]:
        """The text of a chunk; with its end, why."""
        index = self._index(job, chunk.index)
        shown = self._shown([chunk.logprob]) if chunk.logprob else []
        logprobs = self._makers[index].of(shown) if shown else None
        trace = of_chunk(chunk, self.llm.tokenizer)
        if chunk.completion is None:
            return (
                [self._chunk(index, chunk.text, logprobs, trace=trace)]
                if chunk.text or logprobs or trace
                else []
            )
        reason = "length" if chunk.completion.finish_reason == "length" else "stop"
        more = trace | dropped(chunk.completion, self._params)
        return [self._chunk(index, chunk.text, logprobs, reason, chunk.completion.seed, more)]

    def end(self, outputs: Sequence[RequestOutput]) -> list[Event]:
        """The usage, if it was asked for."""
        return [{**self._frame(), "usage": self.usage(outputs)}] if self._include_usage else []

    def failed(self, error: ApiError) -> list[Event]:
        """The error."""
        return [error.body]

    def _index(self, job: int, completion: int) -> int:
        return job * self._params.n + completion

    def _shown(self, logprobs: list[Any]) -> list[Any]:
        ends = self.llm.tokenizer.eos_ids
        return [each for each in logprobs if each.token_id not in ends]

    def _new_maker(self) -> CompletionLogprobsMaker:
        return CompletionLogprobsMaker(self.llm.tokenizer, self._params.skip_special_tokens)

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: Any = None,
        reason: str | None = None,
        seed: int | None = None,
        trace: dict[str, Any] | None = None,
    ) -> Event:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            **(trace or {}),
        }
        if seed is not None:
            choice["seed"] = seed
        usage = {"usage": None} if self._include_usage else {}
        return {**self._frame(), "choices": [choice], **usage}

    def _frame(self) -> CompletionBody:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": [],
        }
