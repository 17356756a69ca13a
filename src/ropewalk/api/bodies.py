"""Bodies of answers: their shapes, as OpenAI's clients parse them, and what several endpoints share.

The shapes are also what the OpenAPI document says of answers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic cannot read typing's before Python 3.12

from ropewalk import __version__
from ropewalk.outputs import CompletionOutput, RequestOutput
from ropewalk.params import SamplingParams

FINGERPRINT = f"ropewalk-{__version__}"
FinishReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(TypedDict):
    """`prompt_tokens_details`. `truncated_tokens` were left out, in a request with `truncate_prompt_tokens`."""

    cached_tokens: int
    truncated_tokens: NotRequired[int]


class Usage(TypedDict):
    """Tokens of one request. A prompt counts once, however many completions it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenLogprob(TypedDict):
    """One token of `top_logprobs`. `bytes` are the token's own, whole characters or not."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """One token of the answer."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """`logprobs` of a chat choice."""

    content: list[ContentLogprob]
    refusal: None


class CalledFunctionBody(TypedDict):
    """What the model calls; `arguments` is JSON text."""

    name: NotRequired[str]
    arguments: str


class PromptLogprob(TypedDict):
    """A token that stands, or might have stood, at one place of a prompt; 1 is the rank of the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""`prompt_logprobs`, as vLLM has them: for each token of the prompt, by token id; null for the first."""


class ToolCallBody(TypedDict):
    """A call; `index` only in deltas."""

    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunctionBody
    index: NotRequired[int]


class MessageBody(TypedDict):
    """A message, or what a chunk adds to it."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallBody]]


class ChatChoice(TypedDict):
    """One answer. `seed` gives it again, alone; `dropped_tokens` have left the context, in one with `slide`."""

    index: int
    message: MessageBody
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    seed: int | None
    dropped_tokens: NotRequired[int]
    trace: NotRequired[list[dict[str, Any]]]


class ChatBody(TypedDict):
    """Of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChunkChoice(TypedDict):
    """What a chunk adds to an answer."""

    index: int
    delta: MessageBody
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    seed: NotRequired[int | None]
    dropped_tokens: NotRequired[int]
    trace: NotRequired[list[dict[str, Any]]]


class ChatChunk(TypedDict):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


class CompletionLogprobs(TypedDict):
    """`logprobs` of a completion: lists of one item a token; null for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    seed: NotRequired[int | None]
    prompt_logprobs: NotRequired[PromptLogprobs]
    dropped_tokens: NotRequired[int]
    trace: NotRequired[list[dict[str, Any]]]


class CompletionBody(TypedDict):
    """Of /v1/completions, whole or as a chunk."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class EmbeddingBody(TypedDict):
    """One vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsBody(TypedDict):
    """Of /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[EmbeddingBody]
    usage: dict[str, int]


class TokenizeBody(TypedDict):
    """Of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class DetokenizeBody(TypedDict):
    """Of /detokenize."""

    prompt: str


class TokenizerBody(TypedDict):
    """Of /tokenizer_info, as vLLM has it: what a client needs that renders chats and counts tokens by itself."""

    bos_token: str | None
    eos_token: str | None
    add_bos_token: bool
    add_eos_token: bool
    chat_template: str | None
    model_max_length: int


class ModelBody(TypedDict):
    """One model of /v1/models."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelsBody(TypedDict):
    """Of /v1/models."""

    object: Literal["list"]
    data: list[ModelBody]


class ErrorDetail(TypedDict):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """Of every answer with a status of 400 or more."""

    error: ErrorDetail


def usage_of(outputs: Iterable[RequestOutput], n_truncated: int | None = None) -> Usage:
    """Return what the outputs of a request cost together, and what was left out of prompts that might be cut."""
    timings = [output.timings for output in outputs]
    read, made = sum(t.prompt_tokens for t in timings), sum(t.generated_tokens for t in timings)
    details: CachedTokens = {"cached_tokens": sum(t.cached_tokens for t in timings)}
    if n_truncated is not None:
        details["truncated_tokens"] = n_truncated
    return {
        "prompt_tokens": read,
        "completion_tokens": made,
        "total_tokens": read + made,
        "prompt_tokens_details": details,
    }


def dropped(completion: CompletionOutput, params: SamplingParams) -> dict[str, Any]:
    """The member of a choice that tells what has left the context, if something may."""
    return {"dropped_tokens": completion.n_dropped} if params.slide else {}


def new_id(prefix: str) -> str:
    """Return a fresh name such as `chatcmpl-0123...`."""
    return f"{prefix}{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


Event = dict[str, Any]


class MachineBody(TypedDict):
    """Of /machine. `read_bytes_per_s` is the bound of decoding: all threads read the weights, and do nothing else."""

    threads: int
    read_bytes_per_s: float
