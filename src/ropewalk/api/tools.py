"""Function calling: how each family of templates writes a call, the grammar that holds a model to it.

A call is a JSON object with a name and arguments; formats differ in what stands around it and in the name of the
second key. `ToolFormat.of` recognises a template's own format by what its source says. A template that knows no tools
gets the "json" format, and `ToolFormat.explained` tells the model about the tools in the system message instead.
Reading calls back is the business of `ropewalk.api.answer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.text.grammar import JSON_OPTIONS

MAX_CALLS = 16
"""In one answer."""

Json = Mapping[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """Where calls stand in an answer.

    Attributes
    ----------
    name : str
    marker : str
        Begins a call (or, if `listed`, the list of them). "": an answer that begins with an object of the right form is
        a call.
    opening, closing : str
        Between marker and object, and after the object.
    separator : str
        Between two calls.
    key : str
        Of the arguments.
    listed : bool
        One marker begins all calls; otherwise each has its own.
    explained_by_template : bool
        Whether the template tells the model about tools.
    """

    name: str
    marker: str
    opening: str
    closing: str
    separator: str
    key: str = "arguments"
    listed: bool = False
    explained_by_template: bool = True

    @classmethod
    def of(cls, template_source: str) -> ToolFormat:
        """Return the format of a template."""
        if "[TOOL_CALLS]" in template_source:
            return MISTRAL
        if "<tool_call>" in template_source:
            return HERMES
        if "<|python_tag|>" in template_source or (
            '"parameters": ' in template_source and "tools" in template_source
        ):
            return LLAMA
        return JSON

    def grammar(
        self,
        tools: Sequence[Json],
        *,
        required: bool,
        parallel: bool,
        marker_id: int | None = None,
        answer: str | None = None,
    ) -> str:
        """Return a Lark grammar of the answers that are allowed.

        Parameters
        ----------
        tools : the functions that may be called.
        required : only calls; otherwise free text, in which what begins like a call is one.
        parallel : up to `MAX_CALLS` calls in place of one.
        marker_id : the id of the marker if it is a control token, whose text the model cannot spell.
        answer : right side of a rule for an answer in place of calls; None: free text.
        """
        more = MAX_CALLS - 1 if parallel else 0
        separator = f"{_quoted(self.separator)} " if self.separator else ""
        body = f"{_quoted(self.opening)} call {_quoted(self.closing)}"
        if self.listed:
            calls = "call" + (f" ({separator}call){{0,{more}}}" if more else "")
            body = f"{_quoted(self.opening)} {calls} {_quoted(self.closing)}"
        marker = f"<[{marker_id}]>" if marker_id is not None else _quoted(self.marker)
        rules = [self._start(marker, body, separator, more, required, answer)]
        names = " | ".join(f"call_{i}" for i in range(len(tools)))
        rules.append(f"call: {names}")
        for i, tool in enumerate(tools):
            if not self.marker and answer is not None:
                # As JSON through and through, since the answer may begin with the same brace.
                rules.append(f"call_{i}: %json {json.dumps(self._call_schema(tool))}")
                continue
            head = f'{{"name": {json.dumps(tool["name"])}, "{self.key}": '
            if not self.marker and not required:  # the lazy beginning of `_start` has read this much
                head = head.removeprefix('{"name": ')
            rules.append(f"call_{i}: {_quoted(head)} arguments_{i} {_quoted('}')}")
            rules.append(f"arguments_{i}: %json {json.dumps(_schema(tool))}")
        return "\n".join(rules)

    def _start(
        self, marker: str, body: str, separator: str, more: int, required: bool, answer: str | None
    ) -> str:
        if required or answer is not None:
            one = f"{marker} {body}" if self.marker else body
            again = f" ({separator}one){{0,{more}}}" if more and not self.listed else ""
            otherwise = "" if answer is None else f" | answer\nanswer: {answer}"
            return f"start: one{again}{otherwise}\none: {one}"
        text = "text: /(.|\\n)*/"
        if not self.marker:
            return f'start: begun {body} | text\nbegun[lazy]: "{{\\"name\\": "\n{text}'
        if marker.startswith("<["):
            begun = f"begun: text {marker}"
        else:
            begun = f"begun[lazy]: /(.|\\n)*/ {marker}"
        times = 1 if self.listed else more + 1
        return f"start: one{{0,{times}}} text\none: begun {body}\n{begun}\n{text}"

    def _call_schema(self, tool: Json) -> dict[str, Any]:
        properties = {"name": {"const": tool["name"]}, self.key: _schema(tool)}
        required = ["name", self.key]
        closed = {"properties": properties, "required": required, "additionalProperties": False}
        return {"type": "object", **closed, "x-guidance": JSON_OPTIONS}

    def explained(self, messages: Sequence[Json], tools: Sequence[Json]) -> list[dict[str, Any]]:
        """Return messages for a template without tools: calls and results in words, tools in the system message."""
        names: dict[str, str] = {}
        told: list[dict[str, Any]] = []
        for message in messages:
            copy = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
            if calls := message.get("tool_calls"):
                names |= {call["id"]: call["function"]["name"] for call in calls}
                lines = [self._written(call["function"]) for call in calls]
                copy["content"] = "\n".join([*filter(None, [message.get("content")]), *lines])
            elif message["role"] == "tool":
                called = names.get(message["tool_call_id"], "the function")
                copy |= {"role": "user", "content": f"Result of {called}: {message['content']}"}
            told.append(copy)
        if not tools:
            return told
        text = _EXPLANATION.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if told and told[0]["role"] == "system":
            told[0] |= {"content": f"{told[0]['content']}\n\n{text}"}
        else:
            told.insert(0, {"role": "system", "content": text})
        return told

    def _written(self, function: Json) -> str:
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            arguments = function["arguments"]
        return json.dumps({"name": function["name"], self.key: arguments}, ensure_ascii=False)


_EXPLANATION = """You can call functions. To call one, answer with nothing but a JSON object of this form:
{{"name": "FUNCTION", "arguments": {{...}}}}
These are the functions:
{}"""

HERMES = ToolFormat("hermes", "<tool_call>", "\n", "\n</tool_call>", "\n")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "[", "]", ", ", listed=True)
LLAMA = ToolFormat("llama", "", "", "", "\n", key="parameters")
JSON = ToolFormat("json", "", "", "", "\n", explained_by_template=False)


def _schema(tool: Json) -> dict[str, Any]:
    parameters = tool.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters, "x-guidance": JSON_OPTIONS}


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
