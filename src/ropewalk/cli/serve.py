"""`ropewalk serve`: models behind OpenAI's HTTP API."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropewalk.cli.console import one_line, reason, tell, verb
from ropewalk.cli.loading import open_llm
from ropewalk.cli.options import DEFAULT_MODEL, Machine, drafting_machine, takes
from ropewalk.errors import InvalidParameterError

if TYPE_CHECKING:
    from ropewalk.async_engine import AsyncEngine

KEY_VARIABLE = "ROPEWALK_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@verb
@takes(machine=drafting_machine)
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help=f"Paths, catalog names or hf.co/owner/repo[:file]. Default: {DEFAULT_MODEL}.",
        ),
    ] = None,
    *,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 is all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="0 takes a free one.")] = 8000,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="NAME[=MODEL]", help="One more name for a model. Repeatable."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help=f"Keys, one a line. Also read from ${KEY_VARIABLE}."),
    ] = None,
    max_batch: Annotated[
        int, typer.Option("--max-batch", min=1, help="Completions that run at once, for each model.")
    ] = 32,
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=0, help="Completions that may wait; more get status 429.")
    ] = 256,
    max_body: Annotated[
        float, typer.Option("--max-body", min=0.001, help="Of a request, in MiB; more gets status 413.")
    ] = 8.0,
    max_prompt_tokens: Annotated[
        int | None, typer.Option("--max-prompt-tokens", min=1, help="Default: what the context allows.")
    ] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option("--max-output-tokens", min=1, help="Most that a request may ask for.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds that a request may take; 0 is no limit.")
    ] = 600.0,
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds to finish requests when told to stop.")
    ] = 30.0,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", metavar="URL", help="Web pages that may call; '*' is all. Repeatable."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="A host name, besides localhost, to be called by. Repeatable.",
        ),
    ] = None,
    root_path: Annotated[
        str, typer.Option("--root-path", metavar="PATH", help="What a proxy puts before every path.")
    ] = "",
    ssl_certfile: Annotated[Path | None, typer.Option("--ssl-certfile", help="For HTTPS.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option("--ssl-keyfile", help="For HTTPS.")] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="One line of JSON a request, on stderr.")
    ] = True,
    machine: Machine,
) -> None:
    """Serve models to OpenAI's clients.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /tokenize, /detokenize; GET /v1/models,
    /health, /metrics, /version, /openapi.json; and a page to chat with at /.
    """
    from ropewalk.async_engine import AsyncEngine
    from ropewalk.serve.app import make_app
    from ropewalk.serve.options import MIB, ServerOptions
    from ropewalk.serve.server import bind, check_certificate, make_server

    names = by_name(models or [DEFAULT_MODEL])
    keys = read_keys(api_key_file)
    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise typer.BadParameter("--ssl-certfile and --ssl-keyfile belong together")
    for path in (ssl_certfile, ssl_keyfile):
        if path is not None and not path.is_file():
            raise typer.BadParameter(f"there is no file {one_line(path)}")
    if ssl_certfile is not None and ssl_keyfile is not None:
        check_certificate(str(ssl_certfile), str(ssl_keyfile))
    if not re.fullmatch(r"(/[!-.0-~]+)*/?", root_path):
        raise typer.BadParameter(
            f"--root-path is {one_line(root_path)}; allowed: a path such as /llm, in ASCII"
        )
    options = ServerOptions(
        max_queue=max_queue,
        max_body_bytes=int(max_body * MIB),
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens,
        request_s=timeout or None,
        grace_s=grace,
        api_keys=keys,
        allowed_hosts=hosts(host, allow_host or [], guarded=bool(keys)),
        cors_origins=tuple(checked_origin(origin) for origin in cors_origin or ()),
        aliases=read_aliases(alias or [], list(names)),
    )
    adapters = adapters_by_model(machine.adapters or {}, list(names))
    with ExitStack() as resources:
        sockets = bind(host, port)
        for each in sockets:
            resources.enter_context(each)
        engines: dict[str, AsyncEngine] = {}
        for name, model in names.items():
            its = replace(machine, adapters=adapters[name] or None)
            llm = resources.enter_context(open_llm(model, its, max_batch=max_batch))
            engines[name] = AsyncEngine(llm)
        server = make_server(
            make_app(engines, options),
            sockets=sockets,
            root_path=root_path.rstrip("/"),
            ssl_certfile=str(ssl_certfile) if ssl_certfile else None,
            ssl_keyfile=str(ssl_keyfile) if ssl_keyfile else None,
            access_log=access_log,
        )
        scheme = "https" if ssl_certfile else "http"
        shown = f"[{host}]" if ":" in host else host
        server.run_telling(
            lambda bound: tell(f"Serving {', '.join(map(one_line, names))} at {scheme}://{shown}:{bound}")
        )


def name_of(model: str) -> str:
    """What clients call a model: a file by its name without folder and suffix, any other as it was given."""
    path = Path(model)
    return path.stem if path.suffix in (".gguf", ".safetensors") and not model.startswith("hf.co/") else model


def by_name(models: list[str]) -> dict[str, str]:
    """Models by the names that clients use; raises InvalidParameterError if two have the same."""
    names: dict[str, str] = {}
    for model in models:
        name = name_of(model)
        if name in names:
            raise InvalidParameterError(
                f"two models would have the name {name!r}: {names[name]} and {model}; allowed: names that differ"
            )
        names[name] = model
    return names


def checked_origin(origin: str) -> str:
    """The origin of a web page as browsers send it: scheme, host and port alone."""
    if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
        raise InvalidParameterError(
            f"--cors-origin is {one_line(origin)}; allowed: '*', or one without a path such as https://app.example"
        )
    return origin


def read_keys(file: Path | None) -> tuple[str, ...]:
    """The API keys of a file and of the environment; never from an option, which other users can see."""
    text = os.environ.get(KEY_VARIABLE, "")
    if file is not None:
        try:
            text += "\n" + file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidParameterError(f"--api-key-file {file} cannot be read: {reason(error)}") from None
    keys = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    if file is not None and not keys:
        raise InvalidParameterError(f"--api-key-file {file} has no keys; allowed: one a line")
    return keys


def hosts(host: str, more: list[str], *, guarded: bool) -> frozenset[str] | None:
    """Host names to answer to: all, unless only this machine can call and no key is asked for."""
    if not more and (guarded or host not in LOOPBACK):
        return None
    return frozenset({"localhost", *(name.lower() for name in more)})


def adapters_by_model(
    adapters: Mapping[str, str | os.PathLike[str]], models: list[str]
) -> dict[str, dict[str, str | os.PathLike[str]]]:
    """Each model's adapters by name; `MODEL=NAME` says whose one is.

    Raises InvalidParameterError if that is not said though there are several models, or if two have one name.
    """
    found: dict[str, dict[str, str | os.PathLike[str]]] = {model: {} for model in models}
    for whole, path in adapters.items():
        owner, _, name = whole.rpartition("=")
        model = name_of(owner) if owner else models[0]
        if model not in found or (len(models) > 1 and not owner):
            raise InvalidParameterError(
                f"--lora {whole}={path}: expected {'MODEL=' if len(models) > 1 else '[MODEL=]'}NAME=PATH, "
                f"MODEL one of {', '.join(models)}"
            )
        if any(name in each for each in found.values()):
            raise InvalidParameterError(
                f"--lora {whole}={path}: there are two adapters {name!r}; allowed: one"
            )
        found[model][name] = path
    return found


def read_aliases(texts: list[str], names: list[str]) -> dict[str, str]:
    """All aliases with their models; raises InvalidParameterError if one means two, or hides a model."""
    aliases: dict[str, str] = {}
    for alias, model in (parse_alias(text, names) for text in texts):
        if alias in names or aliases.get(alias, model) != model:
            raise InvalidParameterError(f"--alias {alias} is the name of another model; allowed: a new name")
        aliases[alias] = model
    return aliases


def parse_alias(text: str, names: list[str]) -> tuple[str, str]:
    """`"gpt-4o=smollm2-135m"` as `("gpt-4o", "smollm2-135m")`; without a model the first is meant."""
    alias, _, model = text.partition("=")
    model = name_of(model) if model else names[0]
    if not alias or model not in names:
        raise InvalidParameterError(
            f"--alias {text!r}: expected NAME or NAME=MODEL, MODEL one of {', '.join(names)}"
        )
    return alias, model
