"""The items of an answer of /v1/responses as they grow, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ropewalk.api.answer import Part
from ropewalk.api.bodies import Event, new_id
from ropewalk.api.requests import JsonObject
from ropewalk.api.response_request import Status


class Items:
    """The items of one answer.

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
