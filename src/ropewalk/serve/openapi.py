"""The OpenAPI document: made of the same models that check requests, so it cannot say anything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from ropewalk import __version__
from ropewalk.api import bodies
from ropewalk.api.chat_request import ChatRequest, TokenizeRequest
from ropewalk.api.requests import CompletionRequest, DetokenizeRequest, EmbeddingRequest
from ropewalk.api.response_request import ResponseRequest

POSTS: dict[str, tuple[str, type[BaseModel], Any, Any]] = {
    "/v1/chat/completions": ("Answer a conversation", ChatRequest, bodies.ChatBody, bodies.ChatChunk),
    "/v1/completions": ("Continue prompts", CompletionRequest, bodies.CompletionBody, bodies.CompletionBody),
    "/v1/responses": ("Answer a conversation, newer shape", ResponseRequest, None, None),
    "/v1/embeddings": ("Texts to vectors", EmbeddingRequest, bodies.EmbeddingsBody, None),
    "/tokenize": ("Text or messages to token ids", TokenizeRequest, bodies.TokenizeBody, None),
    "/detokenize": ("Token ids to text", DetokenizeRequest, bodies.DetokenizeBody, None),
}
GETS: dict[str, tuple[str, Any, str]] = {
    "/v1/models": ("The models of this server", bodies.ModelsBody, "application/json"),
    "/v1/models/{model}": ("One of them", bodies.ModelBody, "application/json"),
    "/tokenizer_info": ("The first model's tokenizer", bodies.TokenizerBody, "application/json"),
    "/health": ("Whether the server can answer", None, "application/json"),
    "/metrics": ("Metrics for Prometheus", None, "text/plain"),
    "/version": ("The version of Ropewalk", None, "application/json"),
    "/machine": ("The machine, and how fast it reads memory", bodies.MachineBody, "application/json"),
    "/openapi.json": ("This document", None, "application/json"),
}
STREAMED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_REF = "#/components/schemas/{model}"


def document(model_names: Sequence[str]) -> dict[str, Any]:
    """Return the document of a server that has these models."""
    requests = [(model, "validation") for _, model, _, _ in POSTS.values()]
    _, defs = models_json_schema(requests, ref_template=_REF)  # type: ignore[arg-type]
    schemas: dict[str, Any] = dict(defs.get("$defs", {}))
    paths: dict[str, Any] = {}
    for path, (summary, request, answer, chunk) in POSTS.items():
        schemas[request.__name__]["properties"]["model"] = {
            "anyOf": [{"type": "string", "enum": list(model_names)}, {"type": "null"}],
            "description": "Default: the first.",
        }
        content = {"application/json": {"schema": _schema(answer, schemas)}}
        if path in STREAMED:
            content["text/event-stream"] = {"schema": _event(chunk)}
        body = {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _REF.format(model=request.__name__)}}},
        }
        errors = ("400", "401", "403", "404", "408", "413", "415", "429", "500", "503", "504")
        paths[path] = {"post": {**_operation(summary, content, errors, schemas), "requestBody": body}}
    for path, (summary, answer, kind) in GETS.items():
        schema = _schema(answer, schemas) if kind == "application/json" else {"type": "string"}
        operation = _operation(summary, {kind: {"schema": schema}}, ("401", "403", "404", "503"), schemas)
        if "{model}" in path:
            parameter = {"name": "model", "in": "path", "required": True}
            operation["parameters"] = [{**parameter, "schema": {"type": "string", "enum": list(model_names)}}]
        if path == "/health":
            operation["responses"]["503"] = operation["responses"]["200"]
        paths[path] = {"get": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ropewalk", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(summary: str, content: Any, errors: Sequence[str], schemas: dict[str, Any]) -> dict[str, Any]:
    told = {"application/json": {"schema": _schema(bodies.ErrorBody, schemas)}}
    responses: dict[str, Any] = {"200": {"description": "Done", "content": content}}
    responses |= {status: {"description": "Not done", "content": told} for status in errors}
    return {"summary": summary, "responses": responses}


def _schema(shape: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to the schema of a shape, which is added to `schemas`."""
    if shape is None:
        return {"type": "object"}
    schema = TypeAdapter(shape).json_schema(ref_template=_REF, mode="serialization")
    schemas.update(schema.pop("$defs", {}))
    schemas[shape.__name__] = schema
    return {"$ref": _REF.format(model=shape.__name__)}


def _event(chunk: Any) -> dict[str, Any]:
    """One server-sent event."""
    name = "one of OpenAI's response.* events" if chunk is None else f"a {chunk.__name__}"
    described = {"type": "string", "description": f"JSON of {name}, or of an ErrorBody; at the end [DONE]"}
    fields = {"event": {"type": "string"}, "data": described}
    return {"type": "object", "description": "With stream: true.", "properties": fields, "required": ["data"]}
