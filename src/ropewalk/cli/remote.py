"""A model of a running server, as `ropewalk chat --url` uses it: what it needs of `LLM`, over HTTP."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

from ropewalk.cli.console import one_line
from ropewalk.errors import GenerationError, InvalidParameterError, ModelNotFoundError, PromptError
from ropewalk.outputs import CompletionOutput, RequestOutput, StreamChunk, Timings
from ropewalk.params import SamplingParams

KEY_VARIABLE = "ROPEWALK_API_KEY"
TIMEOUT_S = 600.0
_SPELLED = {  # where a body calls it differently, or there is no point in sending it
    "max_tokens": "max_completion_tokens",
    "n": None,
    "logprobs": None,
}


class RemoteModel:
    """One model of a server that speaks OpenAI's API.

    Parameters
    ----------
    url : str
        Of the server, with or without /v1 at its end.
    model : str or None
        Its name there. Default: the server's first.

    Attributes
    ----------
    name : str
    context_length : int
        0 if the server does not tell.

    Raises
    ------
    GenerationError
        If the server cannot be reached or refuses.
    ModelNotFoundError
        If it has no such model.
    """

    has_chat_template = True

    def __init__(self, url: str, model: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidParameterError(
                f"--url is {url!r}; allowed: http://HOST[:PORT] or https://HOST[:PORT]"
            )
        self._url, self._parts = url, parts
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        with self._answer("GET", "/v1/models") as response:
            models = {entry["id"]: entry for entry in json.load(response)["data"]}
        if not models:
            raise ModelNotFoundError(f"{url} serves no models")
        self.name = next(iter(models)) if model is None else model
        if self.name not in models:
            raise ModelNotFoundError(f"{url} does not serve {self.name!r}; it serves {', '.join(models)}")
        self.context_length = int(models[self.name].get("max_model_len", 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Generator[StreamChunk, None, None]:
        """As `LLM.stream_chat`; times are as they are seen from here, and tokens as the server counts them."""
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **_as_body(params),
        }
        started = time.perf_counter()
        first = last = 0.0
        text = ""
        end: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        with self._answer("POST", "/v1/chat/completions", body) as response:
            for event in _events(response):
                if "error" in event:
                    raise GenerationError(one_line(event["error"]["message"]))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        last = time.perf_counter()
                        first = first or last
                        text += piece
                        yield StreamChunk(text=piece, token_id=-1)
                    end = choice if choice["finish_reason"] else end
        if not end:
            raise GenerationError(f"{self._url} ended the answer in the middle")
        completion = CompletionOutput(text, [], end["finish_reason"], seed=end.get("seed"))
        timings = Timings(
            prompt_tokens=usage.get("prompt_tokens", 0),
            generated_tokens=usage.get("completion_tokens", 0),
            prefill_s=max(0.0, first - started),
            decode_s=last - first,
            time_to_first_token_s=max(0.0, first - started),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        )
        output = RequestOutput(None, [], [completion], completion.seed or 0, timings)
        yield StreamChunk(text="", token_id=-1, completion=completion, output=output)

    def _answer(self, method: str, path: str, body: Any = None) -> _Closing:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port, timeout=TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE, "").strip():
            headers["Authorization"] = f"Bearer {key.splitlines()[0]}"
        try:
            connection.request(
                method, self._prefix + path, None if body is None else json.dumps(body), headers
            )
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise GenerationError(f"{self._url} cannot be reached: {error}") from error
        except (GenerationError, PromptError):
            connection.close()
            raise
        return _Closing(connection, response)


class _Closing:
    """A response whose connection ends with the context: closing it early ends the request at the server."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection, self._response = connection, response

    def __enter__(self) -> http.client.HTTPResponse:
        return self._response

    def __exit__(self, *error: object) -> None:
        self._response.close()
        self._connection.close()


def _events(response: http.client.HTTPResponse) -> Generator[dict[str, Any], None, None]:
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if line.startswith(b"data: ") and data != b"[DONE]":
            yield json.loads(data)


def _as_body(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not at their defaults, as a body spells them; a default is the server's as well."""
    body: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        name, value = _SPELLED.get(field.name, field.name), getattr(params, field.name)
        default = getattr(SamplingParams(), field.name)
        if name is not None and (value != default or field.name == "max_tokens"):
            body[name] = list(value) if isinstance(value, tuple) else value
    return body


def _refusal(response: http.client.HTTPResponse) -> GenerationError | PromptError:
    try:
        message = json.loads(response.read(100_000))["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {response.status}"
    return (PromptError if response.status == 400 else GenerationError)(one_line(message))
