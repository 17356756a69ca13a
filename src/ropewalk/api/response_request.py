"""Bodies of requests to /v1/responses, and what each is as a request of chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ropewalk.api.body import checked
from ropewalk.api.chat_request import ChatRequest
from ropewalk.api.errors import ApiError
from ropewalk.api.requests import Body, JsonObject, NotStored, Rivals, Seed, Share, Temperature, TopK

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Body):
    """A text of a message. What our own answers hold besides the text is accepted."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Body):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    id: str | None = None
    status: Status | None = None


class CallItem(Body):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class CallOutputItem(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str | None = None
    status: Status | None = None


class ReasoningText(Body):
    """A text of a `ReasoningItem`."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What the model thought before its next message; handed to the template."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    content: list[ReasoningText] | None = None
    status: Status | None = None


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else "?"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class TextFormat(Body):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """`text`."""

    format: TextFormat | None = None


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    name: str


class ResponseRequest(Body):
    """Body of /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    top_logprobs: Rivals | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = Field(
        default=None, description="Echoed."
    )
    user: str | None = Field(default=None, description="Written to the access log.")
    store: NotStored | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="auto: leave out the oldest turns of what does not fit into the context."
    )
    service_tier: Literal["auto", "default"] | None = None

    def as_chat(self) -> ChatRequest:
        """Return the same as a request of chat."""
        choice = self.tool_choice
        format_ = self.text.format if self.text else None
        given: JsonObject = {
            "messages": list(_messages(self)),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_tool(tool) for tool in self.tools] if self.tools else None,
            "response_format": _response_format(format_) if format_ else None,
            "tool_choice": choice,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
        }
        if isinstance(choice, FunctionChoice):
            given["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        same = "temperature top_p top_k min_p seed parallel_tool_calls chat_template_kwargs"
        given |= {name: getattr(self, name) for name in same.split()}
        if self.top_logprobs is not None or self.include:
            given |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return checked(ChatRequest, given)


def _messages(request: ResponseRequest) -> Iterator[JsonObject]:
    """The conversation as chat knows it: calls of one turn are part of one message."""
    if request.instructions is not None:
        yield {"role": "system", "content": request.instructions}
    if isinstance(request.input, str):
        yield {"role": "user", "content": request.input}
        return
    pending: JsonObject = {}  # an assistant's message that may go on
    for item in request.input:
        if isinstance(item, ReasoningItem):
            if pending:
                yield pending
            thought = "".join(text.text for text in item.content or ())
            pending = {"role": "assistant", "content": "", "reasoning_content": thought}
        elif isinstance(item, CallItem):
            pending = pending or {"role": "assistant", "content": None}
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            pending.setdefault("tool_calls", []).append(call)
        elif isinstance(item, MessageItem) and item.role == "assistant":
            if pending.get("content") or pending.get("tool_calls"):
                yield pending
                pending = {}
            pending = {**(pending or {"role": "assistant"}), "content": _text(item.content)}
        else:
            if pending:
                yield pending
                pending = {}
            if isinstance(item, CallOutputItem):
                yield {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
            else:
                yield {"role": item.role, "content": _text(item.content)}
    if pending:
        yield pending


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(tool: FunctionTool) -> JsonObject:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _response_format(form: TextFormat) -> JsonObject:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema_ is None:
        raise ApiError("text.format.schema is missing", param="text.format.schema")
    return {"type": form.type, "json_schema": {"name": form.name or "answer", "schema": form.schema_}}
