"""Bodies of requests, field by field. A field that is not here is refused by name; every field here is honoured.

Field names and meanings are OpenAI's; those that OpenAI lacks are vLLM's. null means the same as leaving out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ropewalk.params import SamplingParams

JsonObject = dict[str, Any]
TokenIds = list[int]
_SAME_NAME = [  # in a body and in SamplingParams
    *("n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "trace"),
    *("truncate_prompt_tokens", "slide", "keep_tokens"),
]


def _nothing_is_stored(store: bool) -> bool:
    if store:
        raise ValueError("allowed is false alone, since nothing is stored")
    return store


Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Rivals = Annotated[int, Field(ge=0, le=20)]
"""So many of the likeliest tokens, beside the one that stands there."""
PromptLogprobs = Annotated[
    int | None,
    Field(
        ge=0,
        le=20,
        description="Log-probabilities of the prompt's tokens, and of so many likeliest ones: `prompt_logprobs` of the "
        "answer. Not with stream.",
    ),
]
NotStored = Annotated[bool, AfterValidator(_nothing_is_stored), Field(json_schema_extra={"const": False})]


class Body(BaseModel):
    """Strict: no conversions but int to float, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


# What chat and completions share.


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = None


class Sampling(Body):
    """How tokens are chosen, and when to stop."""

    model: str | None = Field(default=None, description="A name of /v1/models. Default: the first.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    logit_bias: (
        dict[
            Annotated[str, Field(pattern="^[0-9]{1,9}$")],
            Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)],
        ]
        | None
    ) = Field(default=None, max_length=1024)
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=1024)] | None = (
        None
    )
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    user: str | None = Field(default=None, description="Written to the access log.")
    trace: Annotated[int, Field(ge=0, le=50)] | None = Field(
        default=None,
        description="Tell how each token came to be drawn, with so many candidates, and what its step read and cost: "
        "`trace` of the choice.",
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        default=None,
        description="Leave out the middle of a longer prompt, or the oldest turns of a chat, so that so many tokens "
        "are left; -1: only if it does not fit. `truncated_tokens` of the usage tells what was left out.",
    )
    slide: bool | None = Field(
        default=None,
        description="Go on when the context is full, without the older half of what is in it; needs max_tokens. "
        "`dropped_tokens` of the choice tells how many tokens have left.",
    )
    keep_tokens: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Tokens at the beginning that neither leaves out. Default: the system messages.",
    )
    regex: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="The answer matches this regular expression (Rust's syntax, without look-around).",
    )
    grammar: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="The answer is a sentence of this Lark grammar, as llguidance reads them."
    )

    @model_validator(mode="after")
    def _options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        return self

    def sampling_params(
        self,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        adapters: Collection[str] = (),
    ) -> SamplingParams:
        """Return the engine's parameters; the first three are spelled differently by each endpoint.

        A request whose model is one of `adapters` goes through that one.
        """
        given = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        seed = None if self.seed is None else self.seed % 2**64
        adapter = self.model if self.model in adapters else None
        return SamplingParams(
            **given,
            seed=seed,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            adapter=adapter,
        )


class JsonSchemaFormat(Body):
    """`json_schema` of a `response_format`. It is enforced whether or not it says `strict`."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: JsonObject | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with type 'json_schema', and only then")
        return self


class CompletionRequest(Sampling):
    """Body of /v1/completions."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="0 reads the prompt and answers with no token."
    )
    logprobs: Rivals | None = Field(
        default=None, description="With echo, of the prompt's tokens too; then not with stream."
    )
    prompt_logprobs: PromptLogprobs = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if isinstance(self.prompt, list) and not self.prompt:
            raise ValueError("prompt is an empty list")
        if isinstance(self.prompt, list) and len(self.prompts) > 256:
            raise ValueError("prompt is a list of more than 256 prompts")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is only allowed equal to n")
        if self.max_tokens == 0 and self.min_tokens:
            raise ValueError("min_tokens is more than max_tokens, which is 0")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs and stream cannot be combined")
        if self.scores_echo and self.stream:
            raise ValueError("echo, logprobs and stream cannot be combined")
        if self.scores_echo and self.truncate_prompt_tokens is not None:
            raise ValueError("echo, logprobs and truncate_prompt_tokens cannot be combined")
        return self

    @property
    def scores_echo(self) -> bool:
        """Whether `logprobs` are those of the prompt as well."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def prompts(self) -> list[str | TokenIds]:
        """The prompts, each a text or token ids."""
        return _several(self.prompt)


def _several(prompts: str | list[str] | TokenIds | list[TokenIds]) -> list[str | TokenIds]:
    """One prompt, or several, as a list of them."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)  # type: ignore[arg-type]


# The others.


class EmbeddingRequest(Body):
    """Body of /v1/embeddings."""

    model: str | None = None
    input: str | list[str] | TokenIds | list[TokenIds]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Only what the model has: vectors are not shortened."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        default=None,
        description="Leave out the middle of a longer text; -1: what does not fit into the context.",
    )
    user: str | None = Field(default=None, description="Written to the access log.")

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens is 0; allowed: at least 1, or -1")
        if not self.input:
            raise ValueError("input is empty")
        if len(self.texts) > 2048:
            raise ValueError("input is a list of more than 2048 texts")
        return self

    @property
    def texts(self) -> list[str | TokenIds]:
        """The inputs, each a text or token ids."""
        return _several(self.input)


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]
