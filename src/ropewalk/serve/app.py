"""The ASGI application: which path does what."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ropewalk import __version__
from ropewalk.api.bodies import DetokenizeBody, MachineBody, ModelsBody, TokenizeBody, TokenizerBody
from ropewalk.api.body import checked
from ropewalk.api.chat import Conversation
from ropewalk.api.chat_request import ChatRequest, TokenizeRequest
from ropewalk.api.embeddings import EmbeddingTask
from ropewalk.api.errors import ApiError, as_api_error
from ropewalk.api.requests import DetokenizeRequest
from ropewalk.api.tasks import Task, check_length, make_task
from ropewalk.outputs import RequestOutput
from ropewalk.serve import page
from ropewalk.serve.gate import Gate
from ropewalk.serve.http import EventStream, error_response, read_body, while_connected
from ropewalk.serve.metrics import Metrics
from ropewalk.serve.models import Models, Served
from ropewalk.serve.openapi import document
from ropewalk.serve.options import ServerOptions
from ropewalk.serve.running import Running
from ropewalk.text.chat import encode_chat

if TYPE_CHECKING:
    from ropewalk.async_engine import AsyncEngine

MEASURE_EVERY_S = 5.0
"""A measurement takes the engine a fraction of a second, and on a busy machine it finds too little."""
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class Endpoints:
    """What each path does.

    Parameters
    ----------
    engines : mapping of model name to AsyncEngine
    options : ServerOptions

    Attributes
    ----------
    running : Running
    models : Models
    metrics : Metrics
    """

    def __init__(self, engines: Mapping[str, AsyncEngine], options: ServerOptions) -> None:
        served = {
            name: Served(name, engine, engine.llm.max_batch + options.max_queue)
            for name, engine in engines.items()
        }
        self.options = options
        self.models = Models(served, options.aliases)
        self.metrics = Metrics(self.models)
        self.running = Running(options, self.metrics)
        self._document: dict[str, Any] | None = None
        self._measuring = asyncio.Lock()
        self._threads, self._read_bytes_per_s, self._measured_s = 0, 0.0, -math.inf

    def routes(self) -> list[Route]:
        """All of them."""
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = dict.fromkeys(GENERATING, self.generate)
        posts |= {"/v1/embeddings": self.embed, "/tokenize": self.tokenize, "/detokenize": self.detokenize}
        gets = {
            "/v1/models": self.list_models,
            "/v1/models/{model:path}": self.one_model,
            "/tokenizer_info": self.tokenizer_info,
            "/health": self.health,
            "/metrics": self.show_metrics,
            "/version": self.version,
            "/machine": self.machine,
            "/openapi.json": self.openapi,
        }
        return [
            *page.routes(),
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
        ]

    # Generating.

    async def generate(self, request: Request) -> Response:
        """Chat, completions and responses, whole or streamed."""
        body = await self._body(request)
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        task = await self._task(path, body)
        served = self.models.get(body.get("model"))
        record = request.scope["ropewalk.log"]
        record |= {
            "model": task.model,
            "stream": task.stream,
            **({"user": task.user[:64]} if task.user else {}),
        }
        if task.stream:
            return LoggedStream(self.running.begin(task, served), record)
        answer, outputs = await while_connected(request.receive, self.running.whole(task, served))
        record |= _cost(outputs)
        return JSONResponse(answer)

    async def _body(self, request: Request) -> dict[str, Any]:
        async with self.running.limited():
            return await read_body(request, most=self.options.max_body_bytes, seconds=self.options.body_s)

    async def _task(self, path: str, body: dict[str, Any]) -> Task:
        """Text is tokenized and templates run on another thread: both may take seconds."""
        try:
            task = await asyncio.to_thread(make_task, path, body, self.models.find)
        except Exception as error:
            raise as_api_error(error) from error
        self.running.check(task)
        return task

    async def embed(self, request: Request) -> Response:
        """Texts to vectors, one after the other, so that answers go on between them."""
        body = await self._body(request)
        task = await self._in_thread(EmbeddingTask, body, self.models.find)
        served = self.models.get(body.get("model"))
        record = request.scope["ropewalk.log"]
        record |= {"model": task.model, **({"user": task.user[:64]} if task.user else {})}
        answer = await while_connected(request.receive, self.running.embed(task, served))
        record["prompt_tokens"] = answer["usage"]["prompt_tokens"]
        return JSONResponse(answer)

    # Tokens.

    async def tokenize(self, request: Request) -> Response:
        """Text or messages to token ids."""
        body = await self._body(request)
        return JSONResponse(await self._in_thread(self._tokenized, checked(TokenizeRequest, body)))

    def _tokenized(self, request: TokenizeRequest) -> TokenizeBody:
        _, llm = self.models.find(request.model)
        if request.prompt is not None:
            check_length(llm, request.prompt)
            ids = llm.encode(request.prompt, add_special=request.add_special_tokens is not False)
        else:
            variables = {**(request.chat_template_kwargs or {})}
            chat = ChatRequest(
                model=None,
                messages=request.messages or [],
                tools=request.tools,
                chat_template_kwargs=variables,
            )
            generation = request.add_generation_prompt is not False
            ids = encode_chat(llm.tokenizer, Conversation(llm, chat, add_generation_prompt=generation).text)
        answer: TokenizeBody = {"count": len(ids), "max_model_len": llm.context_length, "tokens": ids}
        if request.return_token_strs:
            answer["token_strs"] = [llm.tokenizer.token_text(token) for token in ids]
        return answer

    async def detokenize(self, request: Request) -> Response:
        """Token ids to text."""
        body = checked(DetokenizeRequest, await self._body(request))
        _, llm = self.models.find(body.model)
        text = await self._in_thread(lambda ids: llm.decode(ids, skip_special=False), body.tokens)
        return JSONResponse(DetokenizeBody(prompt=text))

    async def tokenizer_info(self, request: Request) -> Response:
        """What a client needs to know of the first model's tokenizer."""
        _, llm = self.models.find(None)
        tokenizer, template = llm.tokenizer, llm.chat_template
        bos, eos = (
            None if token is None else tokenizer.token_text(token)
            for token in (tokenizer.bos_id, tokenizer.eos_id)
        )
        return JSONResponse(
            TokenizerBody(
                bos_token=bos,
                eos_token=eos,
                add_bos_token=tokenizer.add_bos,
                add_eos_token=tokenizer.add_eos,
                chat_template=None if template is None else template.source,
                model_max_length=llm.context_length,
            )
        )

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await asyncio.to_thread(function, *arguments)
        except Exception as error:
            raise as_api_error(error) from error

    # About the server.

    async def list_models(self, request: Request) -> Response:
        """All models, aliases included."""
        data = [self.models.described(name) for name in self.models.names]
        return JSONResponse(ModelsBody(object="list", data=data))

    async def one_model(self, request: Request) -> Response:
        """One of them."""
        return JSONResponse(self.models.described(request.path_params["model"]))

    async def health(self, request: Request) -> Response:
        """Status 200 while every engine runs and the server is not stopping, else 503."""
        engines = {name: served.engine for name, served in self.models.served.items()}
        dead = {name: type(engine.error).__name__ for name, engine in engines.items() if not engine.is_alive}
        status = "dead" if dead else "stopping" if self.running.closing else "ok"
        return JSONResponse({"status": status, "dead": dead}, status_code=200 if status == "ok" else 503)

    async def show_metrics(self, request: Request) -> Response:
        """For Prometheus."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def version(self, request: Request) -> Response:
        """The version of Ropewalk."""
        return JSONResponse({"version": __version__})

    async def machine(self, request: Request) -> Response:
        """What decoding is bound by. Measured again when somebody asks, but seldom; the best time counts."""
        async with self._measuring:
            if time.monotonic() > self._measured_s + MEASURE_EVERY_S:
                backend: Any = next(iter(self.models.served.values())).engine.llm.backend
                if not hasattr(backend, "read_bandwidth"):
                    raise ApiError("this backend has no memory to measure", status=404)
                found = await asyncio.to_thread(backend.read_bandwidth)
                self._read_bytes_per_s = max(self._read_bytes_per_s, found)
                self._threads, self._measured_s = backend.n_threads, time.monotonic()
        return JSONResponse(MachineBody(threads=self._threads, read_bytes_per_s=self._read_bytes_per_s))

    async def openapi(self, request: Request) -> Response:
        """What this server understands, for programs."""
        if self._document is None:
            self._document = document(self.models.names)
        return JSONResponse(self._document)


class LoggedStream(EventStream):
    """A stream whose cost goes to the log."""

    def __init__(self, streaming: Any, record: dict[str, Any]) -> None:
        super().__init__(streaming)
        self._record = record

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._record |= _cost(self._streaming.outputs)
            if (error := self._streaming.error) is not None:
                self._record["error"] = error.status


def _cost(outputs: list[RequestOutput]) -> dict[str, Any]:
    if not outputs:
        return {}
    return {
        "prompt_tokens": sum(output.timings.prompt_tokens for output in outputs),
        "cached_tokens": sum(output.timings.cached_tokens for output in outputs),
        "completion_tokens": sum(output.timings.generated_tokens for output in outputs),
        "first_token_s": round(min(output.timings.time_to_first_token_s for output in outputs), 4),
        "finish_reasons": [completion.finish_reason for output in outputs for completion in output.outputs],
    }


def make_app(engines: Mapping[str, AsyncEngine], options: ServerOptions | None = None) -> Starlette:
    """Return the application. `app.state.endpoints` is its `Endpoints`.

    Parameters
    ----------
    engines : mapping of model name to AsyncEngine, at least one
        They stay open; the first is meant by requests that name no model.
    options : ServerOptions
    """
    options = options or ServerOptions()
    endpoints = Endpoints(engines, options)
    middleware = [Middleware(Gate, options=options, metrics=endpoints.metrics)]
    if options.cors_origins:
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=list(options.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # OpenAI's client for browsers sends a dozen of its own
                expose_headers=["X-Request-Id", "Retry-After"],
            ),
        )
    handlers: dict[Any, Any] = {ApiError: _tell, HTTPException: _tell_http}
    app = Starlette(routes=endpoints.routes(), middleware=middleware, exception_handlers=handlers)
    app.state.endpoints = endpoints
    return app


async def _tell(request: Request, error: ApiError) -> Response:
    return error_response(error)


async def _tell_http(request: Request, error: HTTPException) -> Response:
    path = request.scope["path"]
    shown = path if len(path) <= 200 and path.isprintable() else "such path"
    message = {404: f"there is no {shown}", 405: f"{request.method[:20]} is not for {shown}"}.get(
        error.status_code, error.detail
    )
    return error_response(ApiError(message, status=error.status_code, headers=dict(error.headers or {})))
