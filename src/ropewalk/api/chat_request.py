"""Bodies of requests that hold a conversation: /v1/chat/completions, and /tokenize, which takes one as well."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ropewalk.api.requests import (
    Body,
    JsonObject,
    NotStored,
    PromptLogprobs,
    ResponseFormat,
    Rivals,
    Sampling,
)


class TextPart(Body):
    """A part of a message's content; only text is known."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """Name and arguments of a call that the assistant made."""

    name: str
    arguments: str


class CalledTool(Body):
    """A call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message. What an assistant's message of an earlier answer may hold besides is accepted while it is null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = Field(default=None, description="Handed to the template.")
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(default=None, description="Handed to the template.")
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of the role 'tool' needs tool_call_id")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("tool_call_id is only allowed in a message of the role 'tool'")
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content is not None):
            raise ValueError(
                "tool_calls and reasoning_content are only allowed in a message of the assistant"
            )
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    def as_dict(self) -> JsonObject:
        """Return the message as templates know it: text content, and only what is there."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        message: JsonObject = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(
        default=None, description="Arguments are always held to the parameters' schema."
    )


class Tool(Body):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The function of a `ToolChoice`."""

    name: str


class ToolChoice(Body):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Rivals | None = None
    prompt_logprobs: PromptLogprobs = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = Field(
        default=None, description="Variables for the template, such as enable_thinking."
    )
    store: NotStored | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens mean the same: give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs and stream cannot be combined")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        if self.tool_choice not in (None, "none") and not names:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError("tool_choice names a function that is not among the tools")
        return self


class TokenizeRequest(Body):
    """Body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = Field(default=None, description="With messages; default true.")
    add_special_tokens: bool | None = Field(default=None, description="With a prompt; default true.")
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.prompt is not None:
            for name in ("tools", "chat_template_kwargs", "add_generation_prompt"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is only allowed with messages")
        elif self.add_special_tokens is not None:
            raise ValueError("add_special_tokens is only allowed with a prompt")
        return self
