"""/v1/completions: prompts continued as they stand. Choices are numbered prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ropewalk.api.bodies import CompletionChoice, Event, FinishReason, dropped
from ropewalk.api.body import checked
from ropewalk.api.choices import ChoicesTask
from ropewalk.api.logprobs import CompletionLogprobsMaker
from ropewalk.api.requests import CompletionRequest
from ropewalk.api.tasks import Find, constraint_of, encoded, make_job
from ropewalk.api.traces import of_chunk, of_completion
from ropewalk.outputs import CompletionOutput, RequestOutput, StreamChunk

DEFAULT_MAX_TOKENS = 16


class CompletionTask(ChoicesTask):
    """One request to /v1/completions."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, body: dict[str, Any], find: Find) -> None:
        request = checked(CompletionRequest, body)
        super().__init__(request, find)
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

    def body(self, outputs: Sequence[RequestOutput]) -> Any:
        """The whole answer."""
        choices = [
            self._choice(job, completion)
            for job, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return self.whole(choices, outputs)

    def _choice(self, job: int, completion: CompletionOutput) -> CompletionChoice:
        logprobs = completion.logprobs
        return {
            "index": self._index(job, completion.index),
            "text": self._echoed[job] + completion.text,
            "logprobs": None if logprobs is None else self._new_maker().of(self.shown(logprobs)),
            "finish_reason": _finish_reason(completion),
            "seed": completion.seed,
            **dropped(completion, self._params),  # type: ignore[typeddict-item]
            **of_completion(completion, self.llm.tokenizer),
        }

    def start(self) -> list[Event]:
        """The prompts, if they are to be repeated."""
        n = self._params.n
        echoed = [self._echoed[index // n] for index in range(self.n_sequences)]
        return [self.chunk(index, {"text": text}) for index, text in enumerate(echoed) if text]

    def take(self, job: int, chunk: StreamChunk) -> list[Event]:
        """The text of a chunk; with its end, why."""
        index = self._index(job, chunk.index)
        shown = self.shown([chunk.logprob]) if chunk.logprob else []
        logprobs = self._makers[index].of(shown) if shown else None
        more = of_chunk(chunk, self.llm.tokenizer)
        reason: FinishReason | None = None
        seed = None
        if chunk.completion is not None:
            reason, seed = _finish_reason(chunk.completion), chunk.completion.seed
            more |= dropped(chunk.completion, self._params)
        elif not (chunk.text or logprobs or more):
            return []
        text = {"text": chunk.text}
        return [self.chunk(index, text, logprobs=logprobs, reason=reason, seed=seed, more=more)]

    def _index(self, job: int, completion: int) -> int:
        return job * self._params.n + completion

    def _new_maker(self) -> CompletionLogprobsMaker:
        return CompletionLogprobsMaker(self.llm.tokenizer, self._params.skip_special_tokens)


def _finish_reason(completion: CompletionOutput) -> FinishReason:
    return "length" if completion.finish_reason == "length" else "stop"
