"""The options that several verbs share, each said once.

A *group* is a function whose keyword parameters are command-line options and whose result is what they mean.
`takes` puts the options of a group into a verb's signature in place of the one parameter that receives the
result.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ropewalk.cli.words import as_options
from ropewalk.errors import InvalidParameterError
from ropewalk.options import DEFAULT_MODEL as DEFAULT_MODEL
from ropewalk.options import LLMOptions
from ropewalk.params import SamplingParams


def takes(**groups: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the verb's parameter `name` is computed by `groups[name]` from that group's options."""
    signatures = {name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True)
        parameters = [p for p in own.parameters.values() if p.name not in groups]
        parameters += [p for signature in signatures.values() for p in signature.values()]

        @functools.wraps(function)
        def call(**options: Any) -> None:
            for name, group in groups.items():
                mine = {option: options.pop(option) for option in signatures[name]}
                try:
                    options[name] = group(**mine)
                except InvalidParameterError as error:
                    raise typer.BadParameter(as_options(str(error), mine)) from None
            function(**options)

        call.__annotations__ = {p.name: p.annotation for p in parameters}
        call.__dict__["__signature__"] = own.replace(parameters=parameters)
        del call.__dict__["__wrapped__"]  # or the types would be read from `function`
        return call

    return decorate


def sampling(
    *,
    temperature: Annotated[
        float, typer.Option("--temperature", "--temp", help="0 always takes the likeliest token.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 keeps all.")] = 40,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Keep the fewest tokens whose probabilities reach p.")
    ] = 0.95,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Keep tokens at least p times as probable as the likeliest.")
    ] = 0.05,
    typical_p: Annotated[
        float, typer.Option("--typical-p", "--typical", help="Locally typical sampling; 1 is off.")
    ] = 1.0,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            "--repetition-penalty",
            "--repeat-penalty",
            help="Divides or multiplies logits of tokens seen before; 1 is off.",
        ),
    ] = 1.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="Subtracted once per time a token was generated.")
    ] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Subtracted if a token was generated at all.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", metavar="ID:BIAS", help="Added to one token's logit. Repeatable."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", "-s", help="Same seed, same text. Default: a new one each time.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Stop after so many tokens; -1: no limit.")
    ] = 512,
    min_tokens: Annotated[int, typer.Option("--min-tokens", help="Do not stop before so many tokens.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Stop before this text. Repeatable.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="Stop at this token. Repeatable.")
    ] = None,
    truncate_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--truncate-prompt-tokens",
            metavar="N",
            help="Cut a longer prompt: of a chat the oldest turns, else its middle; -1: what does not fit.",
        ),
    ] = None,
    slide: Annotated[
        bool, typer.Option("--slide", help="Where the context is full, drop its older half and go on.")
    ] = False,
    keep_tokens: Annotated[
        int | None,
        typer.Option(
            "--keep-tokens", metavar="N", help="Never dropped of a prompt. Default: its system message."
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on where the model would end.")
    ] = False,
    show_stop: Annotated[
        bool, typer.Option("--show-stop", help="Leave the stop text in the answer.")
    ] = False,
    show_special: Annotated[
        bool, typer.Option("--show-special", help="Show special tokens in the answer.")
    ] = False,
) -> SamplingParams:
    """The sampling options, with the defaults that users of llama.cpp know (`SamplingParams` has others)."""
    if max_tokens < 1 and max_tokens != -1:
        raise InvalidParameterError(f"max_tokens is {max_tokens}; allowed: at least 1, or -1 for no limit")
    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        logit_bias=dict(map(parse_bias, logit_bias or ())),
        seed=seed,
        max_tokens=None if max_tokens == -1 else max_tokens,
        min_tokens=min_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        truncate_prompt_tokens=truncate_prompt_tokens,
        slide=slide,
        keep_tokens=keep_tokens,
        ignore_eos=ignore_eos,
        include_stop_str_in_output=show_stop,
        skip_special_tokens=not show_special,
    )


def parse_bias(text: str) -> tuple[int, float]:
    """`"42:-1.5"` as `(42, -1.5)`.

    Raises
    ------
    InvalidParameterError
        If `text` is not a token id, a colon and a number.
    """
    token_id, colon, bias = text.partition(":")
    try:
        if not colon or not re.fullmatch(r"[0-9]+", token_id):
            raise ValueError
        return int(token_id), float(bias)
    except ValueError:
        raise InvalidParameterError(f"--logit-bias {text!r}: expected ID:BIAS, for example 42:-1.5") from None


def rope_settings(scheme: str | None, factor: float | None, original: int | None) -> dict[str, Any] | None:
    """The rotary scaling of the options, as `LLM(rope_scaling=...)` takes it."""
    if scheme is None:
        for name, value in (("--rope-factor", factor), ("--rope-original-context", original)):
            if value is not None:
                raise InvalidParameterError(f"{name} needs --rope-scaling")
        return None
    from ropewalk.model.scaling import SCHEMES, suggest

    if scheme not in {"none", "default", *SCHEMES}:
        raise InvalidParameterError(f"--rope-scaling is {scheme!r}{suggest(scheme)}")
    values = {"rope_type": scheme, "factor": factor, "original_max_position_embeddings": original}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Machine(LLMOptions):
    """The options of `LLM`, as the command line says them."""

    @property
    def adapter(self) -> str | None:
        """The adapter that a single answer goes through: the first."""
        return next(iter(self.adapters or ()), None)


def machine(
    *,
    threads: Annotated[
        int | None,
        typer.Option("--threads", "-t", min=1, help="Default: the cores this process may really use."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", "-c", min=1, help="Tokens of context. Default: the model's, up to 8192."),
    ] = None,
    cache_type: Annotated[
        str, typer.Option("--cache-type", metavar="TYPE", help="The KV cache's elements: float16 or int8.")
    ] = "float16",
    kv_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-memory",
            metavar="SIZE",
            help="Of the KV cache: 2GiB, 500MB or 25%. Default: 25% of what is free, at most what can be used.",
        ),
    ] = None,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute the beginning of each prompt anew.")
    ] = False,
    cache_dir: Annotated[
        str | None,
        typer.Option(
            "--cache-dir", metavar="FOLDER", help="Keep computed beginnings of prompts there, for later runs."
        ),
    ] = None,
    cache_dir_size: Annotated[
        str | None,
        typer.Option("--cache-dir-size", metavar="SIZE", help="Most of them: as --kv-memory. Default: 4GiB."),
    ] = None,
    rope_scaling: Annotated[
        str | None,
        typer.Option(
            "--rope-scaling",
            metavar="SCHEME",
            help="Read further: linear, ntk, yarn, llama3; none: as trained.",
        ),
    ] = None,
    rope_factor: Annotated[
        float | None, typer.Option("--rope-factor", help="How much further --rope-scaling reaches.")
    ] = None,
    rope_original_context: Annotated[
        int | None,
        typer.Option(
            "--rope-original-context", help="Tokens that were trained on. Default: as the file says."
        ),
    ] = None,
    rope_base: Annotated[
        float | None, typer.Option("--rope-base", help="Rotary base in place of the file's.")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option("--quantize", metavar="TYPE", help="Quantize while loading: q8, q6, q5, q4, or a type."),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora",
            metavar="[NAME=]PATH",
            help="A low-rank adapter: a GGUF file or a PEFT folder. serve takes several, each a model's name; "
            "MODEL=NAME=PATH says whose.",
        ),
    ] = None,
) -> Machine:
    """The options that say how to run a model."""
    for name, size in (("kv_memory", kv_memory), ("cache_dir_size", cache_dir_size)):
        if size is not None:
            from ropewalk.engine.budget import parse_memory

            parse_memory(size, free_bytes=2**30, name=name)  # refuses what is no size
    if cache_dir is None and cache_dir_size is not None:
        raise InvalidParameterError("--cache-dir-size needs --cache-dir")
    if cache_dir is not None and no_prefix_cache:
        raise InvalidParameterError("--cache-dir keeps what --no-prefix-cache turns off")
    if quantize is not None:
        from ropewalk.checkpoint.mixes import mix_named

        mix_named(quantize)  # refuses what is no type
    return Machine(
        n_threads=threads,
        context_length=context,
        cache_dtype=cache_type,
        kv_memory=kv_memory,
        prefix_cache=not no_prefix_cache,
        rope_scaling=rope_settings(rope_scaling, rope_factor, rope_original_context),
        rope_base=rope_base,
        cache_dir=cache_dir,
        cache_dir_size=cache_dir_size,
        quantize=quantize,
        adapters=read_adapters(lora) if lora else None,
    )


def read_adapters(texts: list[str]) -> dict[str, str]:
    """Paths by names, of `"NAME=PATH"` each; a path alone is called by its last part, without its suffix.

    Raises
    ------
    InvalidParameterError
        A name or a path is empty, or two adapters have one name.
    """
    adapters: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.rpartition("=")
        if not equals:
            name = Path(text).stem
        if not name or not path:
            raise InvalidParameterError(f"--lora {text!r}: expected [NAME=]PATH")
        if name in adapters:
            raise InvalidParameterError(
                f"--lora {text!r}: {name!r} is {adapters[name]}; allowed: another NAME"
            )
        adapters[name] = path
    return adapters


def drafts(
    *,
    draft_model: Annotated[
        str | None,
        typer.Option(
            "--draft-model",
            metavar="MODEL",
            help="A smaller model of the same vocabulary that guesses ahead: the same text, sooner.",
        ),
    ] = None,
    prompt_lookup: Annotated[
        bool, typer.Option("--prompt-lookup", help="Guess ahead from the text so far: the same text, sooner.")
    ] = False,
    draft_max: Annotated[
        int | None,
        typer.Option(
            "--draft-max", min=1, max=63, help="Most guesses at once. Default: 7, or 15 of a lookup."
        ),
    ] = None,
) -> dict[str, Any]:
    """The options of speculative decoding, as fields of `Machine`."""
    if draft_model is not None and prompt_lookup:
        raise InvalidParameterError(
            "--draft-model and --prompt-lookup both guess ahead; allowed: one of them"
        )
    if draft_max is not None and draft_model is None and not prompt_lookup:
        raise InvalidParameterError("--draft-max needs --draft-model or --prompt-lookup")
    if draft_model == "lookup":
        draft_model = "./lookup"  # a file: the bare word means a lookup in `LLM`
    return {"draft": "lookup" if prompt_lookup else draft_model, "draft_tokens": draft_max}


def drafting_machine(**options: Any) -> Machine:
    """The options of `machine` and `drafts`, for verbs that generate."""
    mine = {name: options.pop(name) for name in inspect.signature(drafts).parameters}
    return replace(machine(**options), **drafts(**mine))


drafting_machine.__dict__["__signature__"] = inspect.Signature(
    [p for group in (machine, drafts) for p in inspect.signature(group, eval_str=True).parameters.values()]
)


def model_argument(*, required: bool = False) -> Any:
    """The argument MODEL; where it may be left out, the verb gives it `DEFAULT_MODEL` or None."""
    known = "A .gguf file, a folder, a catalog name or hf.co/owner/repo[:file]."
    return typer.Argument(
        help=known if required else f"{known} Default: {DEFAULT_MODEL}.", show_default=False
    )
