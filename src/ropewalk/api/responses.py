"""/v1/responses: OpenAI's newer shape of a chat. A request is turned into one of chat; the answer is a list of items.

Nothing is stored: there is no `previous_response_id`, and clients send the whole conversation each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ropewalk.api.answer import AnswerReader
from ropewalk.api.bodies import Event, new_id, now
from ropewalk.api.body import checked
from ropewalk.api.chat import Conversation, finish_reason
from ropewalk.api.errors import ApiError
from ropewalk.api.logprobs import chat_logprob
from ropewalk.api.requests import JsonObject
from ropewalk.api.response_items import Items
from ropewalk.api.response_request import FunctionChoice, ResponseRequest
from ropewalk.api.tasks import Find, Task, structure_of
from ropewalk.engine.sampler import Logprob
from ropewalk.outputs import RequestOutput, StreamChunk


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
        self._reader, self._items, self._sequence = conversation.reader(), Items(), 0

    def body(self, outputs: Sequence[RequestOutput]) -> JsonObject:
        """The whole answer."""
        (completion,) = outputs[0].outputs
        reader, items = self._conversation.reader(), Items()
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

    def _response(self, items: Items, output: RequestOutput | None, reader: AnswerReader) -> JsonObject:
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

    def _usage(self, output: RequestOutput, items: Items) -> JsonObject:
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
