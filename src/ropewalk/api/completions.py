"""/v1/completions: prompts continued as they stand. Choices are numbered prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ropewalk.api.bodies import CompletionChoice, CompletionLogprobs, Event, FinishReason, Usage, dropped
from ropewalk.api.body import checked
from ropewalk.api.choices import ChoicesTask
from ropewalk.api.logprobs import CompletionLogprobsMaker, prompt_logprobs
from ropewalk.api.requests import CompletionRequest
from ropewalk.api.tasks import Find, constraint_of, encoded, make_job
from ropewalk.api.traces import of_chunk, of_completion
from ropewalk.engine.sampler import Logprob
from ropewalk.outputs import CompletionOutput, RequestOutput, StreamChunk

DEFAULT_MAX_TOKENS = 16


class CompletionTask(ChoicesTask):
    """One request to /v1/completions."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, body: dict[str, Any], find: Find) -> None:
        self._request = request = checked(CompletionRequest, body)
        super().__init__(request, find)
        wanted = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        scores = [request.prompt_logprobs, request.logprobs if request.scores_echo else None]
        self._params = params = request.sampling_params(
            max_tokens=max(1, wanted),
            logprobs=request.logprobs,
            prompt_logprobs=max((n for n in scores if n is not None), default=None),
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
        self._makers = [self._new_maker() for _ in range(self.n_sequences)]

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        """What the outputs cost; the token that is drawn all the same where none is wanted does not count."""
        if self._request.max_tokens == 0:
            outputs = [
                replace(output, timings=replace(output.timings, generated_tokens=0)) for output in outputs
            ]
        return super().usage(outputs)

    def body(self, outputs: Sequence[RequestOutput]) -> Any:
        """The whole answer."""
        choices = [
            self._choice(job, output, completion)
            for job, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return self.whole(choices, outputs)

    def _choice(self, job: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        request, completion = self._request, self._kept(completion)
        choice: CompletionChoice = {
            "index": self._index(job, completion.index),
            "text": self._echoed[job] + completion.text,
            "logprobs": self._logprobs(job, output, completion),
            "finish_reason": _finish_reason(completion),
            "seed": completion.seed,
            **dropped(completion, self._params),  # type: ignore[typeddict-item]
            **of_completion(completion, self.llm.tokenizer),
        }
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output, self.llm.tokenizer, request.prompt_logprobs)
        return choice

    def _logprobs(
        self, job: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionLogprobs | None:
        if completion.logprobs is None:
            return None
        maker = self._new_maker()
        echoed = maker.of_prompt(output, self._echoed[job]) if self._request.scores_echo else None
        return maker.of(completion.logprobs, echoed)

    def _kept(self, completion: CompletionOutput) -> CompletionOutput:
        """What is told of a completion: nothing of its one token where none is wanted."""
        if self._request.max_tokens != 0:
            return completion
        logprobs: list[Logprob] | None = None if completion.logprobs is None else []
        return replace(
            completion, text="", token_ids=[], logprobs=logprobs, trace=None, finish_reason="length"
        )

    def start(self) -> list[Event]:
        """The prompts, if they are to be repeated."""
        n = self._params.n
        echoed = [self._echoed[index // n] for index in range(self.n_sequences)]
        return [self.chunk(index, {"text": text}) for index, text in enumerate(echoed) if text]

    def take(self, job: int, chunk: StreamChunk) -> list[Event]:
        """The text of a chunk; with its end, why."""
        if self._request.max_tokens == 0 and chunk.completion is not None:
            completion = self._kept(chunk.completion)
            chunk = replace(chunk, text="", logprob=None, trace=None, completion=completion)
        index = self._index(job, chunk.index)
        logprobs = self._makers[index].of([chunk.logprob]) if chunk.logprob else None
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
        return CompletionLogprobsMaker(
            self.llm.tokenizer, self._request.logprobs or 0, skip_special=self._params.skip_special_tokens
        )


def _finish_reason(completion: CompletionOutput) -> FinishReason:
    return "length" if completion.finish_reason == "length" else "stop"
