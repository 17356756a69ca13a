"""/v1/responses: OpenAI's newer shape of a chat. A request is turned into one of chat; the answer is a list of items.

Nothing is stored: there is no `previous_response_id`, and clients send the whole conversation each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ropewalk.api.answer import AnswerReader, Part
from ropewalk.api.bodies import Event, new_id, now
from ropewalk.api.body import checked
from ropewalk.api.chat import Conversation, finish_reason
from ropewalk.api.errors import ApiError
from ropewalk.api.logprobs import chat_logprob
from ropewalk.api.requests import Body, ChatRequest, JsonObject, NotStored
from ropewalk.api.tasks import Find, Task, structure_of
from ropewalk.engine.sampler import Logprob
from ropewalk.outputs import RequestOutput, StreamChunk

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
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
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


class ResponseTask(Task):
    """One request to /v1/responses."""

    def __init__(self, body: JsonObject, find: Find) -> None:
        self._request = request = checked(ResponseRequest, body)
        chat = request.as_chat()
        self.model, self.llm = find(request.model)
        self.stream, self.user = bool(request.stream), request.user
        self._conversation = conversation = Conversation(self.llm, chat)
        if conversation.shows_control_tokens:
            chat.skip_special_tokens = False
        params = chat.sampling_params(
            max_tokens=request.max_output_tokens,
            logprobs=chat.top_logprobs if chat.logprobs else None,
            adapters=self.llm.adapters,
        )
        constraint = conversation.constraint(structure_of(chat, chat.response_format))
        self.jobs = [conversation.job(params, constraint)]
        self._id, self._created = new_id("resp_"), now()
        self._reader, self._items, self._sequence = conversation.reader(), _Items(), 0

    def body(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        """The whole answer."""
        (completion,) = outputs[0].outputs
        reader, items = self._conversation.reader(), _Items()
        logprobs = [self._logprob(each) for each in self.shown(completion.logprobs or [])]
        for part in reader.push(completion.text) + reader.finish():
            used = logprobs if part.kind == "content" else []
            items.take(part, used)
            logprobs = [] if part.kind == "content" else logprobs
        items.close("incomplete" if completion.finish_reason == "length" else "completed")
        return self._response(items, outputs[0], reader)

    def start(self) -> list[Event]:
        """The response without anything in it, twice, as OpenAI does."""
        response = self._response(self._items, None, self._reader)
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": response} for kind in kinds])

    def take(self, job: int, chunk: StreamChunk) -> list[Event]:
        """What a chunk adds to the items."""
        parts = self._reader.push(chunk.text)
        if chunk.completion is not None:
            parts += self._reader.finish()
        logprobs = [self._logprob(each) for each in self.shown([chunk.logprob] if chunk.logprob else [])]
        events: list[Event] = []
        self._items.logprobs += logprobs
        for part in parts:
            events += self._items.take(part, [])
        return self._numbered(events)

    def end(self, outputs: Sequence[RequestOutput]) -> list[Event]:
        """The end of the last item, and the whole response."""
        cut = outputs[0].finish_reason == "length"
        events = self._items.close("incomplete" if cut else "completed")
        response = self._response(self._items, outputs[0], self._reader)
        kind = "response.incomplete" if cut else "response.completed"
        return self._numbered([*events, {"type": kind, "response": response}])

    def failed(self, error: ApiError) -> list[Event]:
        """The response as it is, with the error."""
        response = self._response(self._items, None, self._reader)
        response |= {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
        return self._numbered([{"type": "response.failed", "response": response}])

    def _numbered(self, events: list[Event]) -> list[Event]:
        numbered = [{**event, "sequence_number": self._sequence + i} for i, event in enumerate(events)]
        self._sequence += len(events)
        return numbered

    def _logprob(self, logprob: Logprob) -> Any:
        return chat_logprob(self.llm.tokenizer, logprob)

    def _response(self, items: _Items, output: RequestOutput | None, reader: AnswerReader) -> JsonObject:
        request, params = self._request, self.jobs[0].params
        status, details = "in_progress", None
        if output is not None:
            cut = finish_reason(output.outputs[0], reader) == "length"
            status = "incomplete" if cut else "completed"
            details = {"reason": "max_output_tokens"} if cut else None
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
        choice = request.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": list(items.done),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": text or {"format": {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None if output is None else self._usage(output, items),
            "user": request.user,
        }

    def _usage(self, output: RequestOutput, items: _Items) -> JsonObject:
        usage = self.usage([output])
        thought = "".join(item["content"][0]["text"] for item in items.done if item["type"] == "reasoning")
        n_thought = len(self.llm.encode(thought, add_special=False)) if thought else 0
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": n_thought},
            "total_tokens": usage["total_tokens"],
        }


class _Items:
    """The items of an answer as they grow, and the events that tell of it.

    Attributes
    ----------
    done : list of items
    logprobs : list
        Of tokens whose text is not told yet.
    """

    def __init__(self) -> None:
        self.done: list[JsonObject] = []
        self.logprobs: list[Any] = []
        self._open: JsonObject | None = None

    def take(self, part: Part, logprobs: Sequence[Any]) -> list[Event]:
        """Add a part."""
        self.logprobs += logprobs
        kind = {"content": "message", "reasoning": "reasoning"}.get(part.kind, "function_call")
        events: list[Event] = []
        if self._open is not None and (self._open["type"] != kind or part.kind == "call"):
            events += self.close("completed")
        if self._open is None:
            events += self._begin(kind, part.text)
        if part.kind != "call":
            events.append(self._add(part.text))
        return events

    def close(self, status: Status) -> list[Event]:
        """End the item that is open, if one is."""
        if (item := self._open) is None:
            return []
        self._open = None
        item["status"] = status
        self.done.append(item)
        where = {"item_id": item["id"], "output_index": len(self.done) - 1}
        end: Event = {
            "type": "response.output_item.done",
            "output_index": where["output_index"],
            "item": item,
        }
        if item["type"] == "function_call":
            kind = "response.function_call_arguments.done"
            return [{"type": kind, **where, "name": item["name"], "arguments": item["arguments"]}, end]
        part = item["content"][0]
        where["content_index"] = 0
        if item["type"] == "reasoning":
            return [{"type": "response.reasoning_text.done", **where, "text": part["text"]}, end]
        text = {
            "type": "response.output_text.done",
            **where,
            "text": part["text"],
            "logprobs": part["logprobs"],
        }
        return [text, {"type": "response.content_part.done", **where, "part": part}, end]

    def _begin(self, kind: str, name: str) -> list[Event]:
        index = len(self.done)
        item: JsonObject
        if kind == "message":
            item = {
                "id": new_id("msg_"),
                "type": kind,
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        elif kind == "reasoning":
            item = {"id": new_id("rs_"), "type": kind, "status": "in_progress", "summary": [], "content": []}
        else:
            item = {"id": new_id("fc_"), "type": kind, "status": "in_progress", "call_id": new_id("call_")}
            item |= {"name": name, "arguments": ""}
        self._open = item
        events: list[Event] = [
            {"type": "response.output_item.added", "output_index": index, "item": _copy(item)}
        ]
        if kind == "message":
            part: JsonObject = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            where = {"item_id": item["id"], "output_index": index, "content_index": 0}
            events.append({"type": "response.content_part.added", **where, "part": _copy(part)})
            item["content"] = [part]
        elif kind == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": ""}]
        return events

    def _add(self, text: str) -> Event:
        assert self._open is not None
        item = self._open
        where: JsonObject = {"item_id": item["id"], "output_index": len(self.done)}
        if item["type"] == "function_call":
            item["arguments"] += text
            return {"type": "response.function_call_arguments.delta", **where, "delta": text}
        part = item["content"][0]
        part["text"] += text
        where["content_index"] = 0
        if item["type"] == "reasoning":
            return {"type": "response.reasoning_text.delta", **where, "delta": text}
        logprobs, self.logprobs = self.logprobs, []
        part["logprobs"] += logprobs
        return {"type": "response.output_text.delta", **where, "delta": text, "logprobs": logprobs}


def _copy(item: JsonObject) -> JsonObject:
    return {k: list(v) if isinstance(v, list) else v for k, v in item.items()}
