"""What a generation gives back: text, tokens, why it ended, and what it cost.

Plain frozen data, made by `ropewalk.llm`; nothing here knows an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropewalk.engine.request import FinishReason
    from ropewalk.engine.sampler import Logprob
    from ropewalk.engine.trace import TokenTrace, Trace


@dataclass(frozen=True)
class Timings:
    """What one request cost, in seconds of wall time.

    Attributes
    ----------
    prompt_tokens, generated_tokens : int
        Tokens of the prompt, and of all completions together.
    cached_tokens : int
        Tokens of the prompt that were found computed in the prefix cache.
    disk_tokens : int
        Those of them that came from disk (`cache_dir`).
    prefill_s : float
        From the first step that ran the request to its first token.
    decode_s : float
        From its first token to its last, of all completions.
    time_to_first_token_s : float
        From its arrival to its first token, waiting included.
    drafted_tokens, accepted_tokens : int
        Guesses that were checked (with `LLM(draft=...)`), and how many of them were right, of all completions.
    """

    prompt_tokens: int
    generated_tokens: int
    prefill_s: float
    decode_s: float
    time_to_first_token_s: float
    cached_tokens: int = 0
    disk_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Share of the guesses that were right; 0 without any."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens computed per second of prefill; 0 if there was none."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first one; 0 if there were no others."""
        return (self.generated_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def time_per_token_s(self) -> float:
        """Seconds for each token after the first one; 0 if there were no others."""
        return self.decode_s / (self.generated_tokens - 1) if self.generated_tokens > 1 else 0.0


@dataclass(frozen=True)
class CompletionOutput:
    """One answer.

    Attributes
    ----------
    text : str
        The generated text, without stop string and special tokens unless they were asked for.
    token_ids : list of int
        Every generated token, the one that ended the generation included.
    finish_reason : "stop", "length" or "error"
        An end token, stop token or stop string; `max_tokens` or the end of the context; or a failure, which
        is in `error`.
    stop_reason : int, str or None
        The stop token or stop string; None for the model's own end tokens.
    logprobs : list of Logprob, or None if not asked for
        One for each token, under the raw distribution of the model.
    trace : Trace, or None if not asked for
        Its steps, with their bytes and times, and its tokens, with what each knob did.
    error : Exception or None
        Why the request failed; what was generated before is kept.
    index : int
        Which completion of its prompt it is.
    seed : int or None
        The seed of its draws. Alone, with `n=1` and this seed, the same answer comes again.
    n_dropped : int
        Tokens of prompt and answer that had left the context by the end (`slide`).
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: list[Logprob] | None = None
    trace: Trace | None = None
    error: Exception | None = None
    index: int = 0
    seed: int | None = None
    n_dropped: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers; the properties are shortcuts to `outputs[0]`.

    Attributes
    ----------
    prompt : str or None
        The text of the prompt (after the chat template, in a chat); None if it was token ids.
    prompt_token_ids : list of int
    outputs : list of CompletionOutput
        `SamplingParams.n` of them, in order.
    prompt_logprobs : list of Logprob or None, one for each token of the prompt; None if not asked for
        How probable each was after those before it; None for the first. Of a request that failed or was ended while
        its prompt was read, as far as it was.
    n_truncated : int
        Tokens that were left out of the prompt because it was too long (`truncate_prompt_tokens`);
        `prompt_token_ids` are those that stayed.
    seed : int
        The seed in use. With it in `SamplingParams`, the same answer comes again.
    timings : Timings
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    timings: Timings
    n_truncated: int = 0
    prompt_logprobs: list[Logprob | None] | None = None

    @property
    def text(self) -> str:
        """The generated text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """Which stop token or stop string ended it."""
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> list[Logprob] | None:
        """Log-probabilities of the generated tokens."""
        return self.outputs[0].logprobs

    @property
    def trace(self) -> Trace | None:
        """What it did, step by step and token by token."""
        return self.outputs[0].trace

    @property
    def error(self) -> Exception | None:
        """Why the request failed."""
        return self.outputs[0].error


@dataclass(frozen=True)
class StreamChunk:
    """What one generated token adds.

    Attributes
    ----------
    text : str
        New text; empty while a character is incomplete or a stop string may be beginning. Joined texts of all
        chunks of a completion are its text.
    token_id : int
    index : int
        The completion that it belongs to.
    logprob : Logprob or None
    trace : TokenTrace or None
        How the token came to be drawn, and the step that computed it, if asked for.
    completion : CompletionOutput or None
        The whole completion, in its last chunk only.
    output : RequestOutput or None
        The whole result, in the last chunk of all only.
    """

    text: str
    token_id: int
    index: int = 0
    logprob: Logprob | None = None
    trace: TokenTrace | None = None
    completion: CompletionOutput | None = None
    output: RequestOutput | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the completion ended; None before its last chunk."""
        return self.completion.finish_reason if self.completion else None
