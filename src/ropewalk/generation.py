"""The text side of a prompt under way: decodes the tokens of its completions as they are drawn.

Here a stop string ends a request that the engine knows by its tokens alone, and results are put together. Does not
know models or prompts' text; `ropewalk.llm` makes one `Generation` for each prompt it submits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ropewalk.engine.engine import Engine
from ropewalk.engine.request import Request
from ropewalk.engine.trace import Trace
from ropewalk.outputs import CompletionOutput, RequestOutput, StreamChunk, Timings
from ropewalk.text.stream import StreamDecoder

if TYPE_CHECKING:
    from ropewalk.engine.trace import TokenTrace
    from ropewalk.text.tokenizer import Tokenizer


class Generation:
    """A prompt and its completions.

    Parameters
    ----------
    requests : list of Request
        One for each completion, in order.
    prompt : str or None
        The prompt's text, for the result.
    tokenizer : Tokenizer

    Attributes
    ----------
    chunks : deque of StreamChunk
        What was not fetched yet.
    on_advance : callable ()
        Called after each step that has brought it further or ended it, by the thread that ran the step.
    lost_by : BaseException or None
        What the step raised in which it was lost.
    n_truncated : int
        Tokens that were left out of the prompt.
    """

    def __init__(self, requests: list[Request], prompt: str | None, tokenizer: Tokenizer) -> None:
        self.requests = requests
        self.prompt = prompt
        self.chunks: deque[StreamChunk] = deque()
        self.on_advance: Callable[[], object] = nothing
        self.lost_by: BaseException | None = None
        self.n_truncated = 0
        self._completions = [_Completion(request, tokenizer) for request in requests]

    @property
    def ended(self) -> bool:
        """Whether the last chunk is made."""
        return all(completion.ended for completion in self._completions)

    @property
    def n_taken(self) -> int:
        """Tokens taken from the engine so far."""
        return sum(completion.n_taken for completion in self._completions)

    @property
    def aborted(self) -> bool:
        """Whether a request was ended before its last chunk."""
        return any(c.request.finish_reason == "abort" and not c.ended for c in self._completions)

    @property
    def error(self) -> Exception | None:
        """Why a completion failed: the first that did."""
        return next((r.error for r in self.requests if r.error is not None), None)

    def advance(self, engine: Engine) -> None:
        """Take what the engine drew since the last call."""
        for completion in self._completions:
            while (chunk := completion.take(engine)) is not None:
                self.chunks.append(replace(chunk, output=self.output) if self.ended else chunk)

    def skip(self, n_output: int) -> str | None:
        """Read the first tokens of the only completion, which somebody has had already; a stop string in them."""
        (completion,) = self._completions
        return completion.skip(n_output)

    @property
    def output(self) -> RequestOutput:
        """The result so far."""
        first = self.requests[0]
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=[int(token) for token in first.tokens[: first.n_prompt]],
            outputs=[completion.output for completion in self._completions],
            seed=first.seed,
            n_truncated=self.n_truncated,
            prompt_logprobs=None if first.params.prompt_logprobs is None else [None, *first.prompt_logprobs],
            timings=Timings(
                prompt_tokens=first.n_prompt,
                cached_tokens=first.n_cached,
                disk_tokens=min(first.n_from_disk, first.n_cached),
                generated_tokens=sum(r.n_output for r in self.requests),
                prefill_s=first.first_token_s - first.started_s,
                decode_s=max(r.last_token_s for r in self.requests) - first.first_token_s,
                time_to_first_token_s=first.first_token_s - first.arrived_s,
                drafted_tokens=sum(r.n_drafted for r in self.requests),
                accepted_tokens=sum(r.n_accepted for r in self.requests),
            ),
        )


class _Completion:
    """One request: `n_taken` counts its tokens so far, `ended` is True once its last chunk is made."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params = request.params
        self.request = request
        self.ended = False
        self.n_taken = 0
        self._decoder = StreamDecoder(
            tokenizer,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
        )

    def take(self, engine: Engine) -> StreamChunk | None:
        """Take the next token and return its chunk; None if there is no more for now."""
        request = self.request
        if self.n_taken < request.n_output and not self.ended:
            token = int(request.tokens[request.n_prompt + self.n_taken])
            self.n_taken += 1
            try:
                return self._chunk(self._text_of(token, engine), token)
            except Exception as error:  # a fault in decoding is this request's alone
                engine.finish(request, "error", n_output=self.n_taken)
                request.error = error
        if request.finish_reason == "error" and not self.ended:
            self._decoder.finish()
            self.ended = True
        return None

    def skip(self, n_output: int) -> str | None:
        """Read tokens without making chunks; return the stop string that they have."""
        for token in self.request.output[:n_output]:
            self.n_taken += 1
            self._decoder.push(token, match_stops=self.n_taken > self.request.params.min_tokens)
            if self._decoder.stop_hit is not None:
                return self._decoder.stop_hit
        return None

    def _text_of(self, token: int, engine: Engine) -> str:
        """Return the text to emit after a token, and end the request if it completes a stop string."""
        request, params, decoder = self.request, self.request.params, self._decoder
        last = self._is_last
        by_token = last and (token in request.end_ids or token in params.stop_ids)
        text = ""
        if params.include_stop_str_in_output or not by_token:
            text = decoder.push(token, match_stops=self.n_taken > params.min_tokens)
        if last:
            text += decoder.finish()
        if decoder.stop_hit is not None:
            engine.finish(request, "stop", decoder.stop_hit, n_output=self.n_taken)
        return text

    @property
    def _is_last(self) -> bool:
        ended = self.request.finish_reason not in (None, "error")  # a failure comes after the last token
        return ended and self.n_taken == self.request.n_output

    def _chunk(self, text: str, token: int) -> StreamChunk:
        logprobs = self.request.logprobs
        self.ended = self._is_last
        return StreamChunk(
            text=text,
            token_id=token,
            index=self.request.index,
            logprob=logprobs[self.n_taken - 1] if logprobs else None,
            trace=self._trace_of(self.request.n_prompt + self.n_taken - 1),
            completion=self.output if self.ended else None,
        )

    def _trace_of(self, position: int) -> TokenTrace | None:
        traced = self.request.traced_tokens
        index = position - traced[0].position if traced else -1
        return traced[index] if 0 <= index < len(traced) else None

    @property
    def output(self) -> CompletionOutput:
        """The answer so far."""
        request = self.request
        return CompletionOutput(
            index=request.index,
            text=self._decoder.text,
            token_ids=request.output,
            finish_reason=request.finish_reason or "abort",
            seed=request.seed,
            n_dropped=request.n_dropped,
            stop_reason=request.stop_reason,
            logprobs=None if request.params.logprobs is None else request.logprobs,
            trace=None
            if request.params.trace is None
            else Trace(tuple(request.traced_steps), tuple(request.traced_tokens)),
            error=request.error,
        )


def nothing() -> None:
    """What is called after a step where nobody wants to be told."""
