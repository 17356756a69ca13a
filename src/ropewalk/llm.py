"""The front door: `LLM` opens a model and turns prompts into text.

It joins what the rooms behind it do: a checkpoint is found and read, its tokenizer, chat template and backend
are built, and an `Engine` runs the requests. Prompts become token ids here; tokens become text in
`ropewalk.generation`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ropewalk.backend.base import Backend, Float32Array
from ropewalk.drafts import check_draft, open_speculator
from ropewalk.driver import Driver
from ropewalk.engine.budget import cache_size, check_context, check_count, disk_bytes
from ropewalk.engine.engine import Engine, check_prompt
from ropewalk.engine.statistics import Statistics
from ropewalk.errors import InvalidParameterError, PromptError, TemplateError, TruncationWarning
from ropewalk.generation import Generation
from ropewalk.model.config import POOLINGS
from ropewalk.outputs import RequestOutput
from ropewalk.params import SamplingParams
from ropewalk.passes import Passes, Score
from ropewalk.stream import Stream
from ropewalk.text.chat import encode_chat
from ropewalk.truncation import cut_tokens, cut_turns, head_tokens, most_tokens

if TYPE_CHECKING:
    from ropewalk.checkpoint.hub import Progress
    from ropewalk.drafts import Draft
    from ropewalk.engine.constraint import Constraint
    from ropewalk.text.chat import ChatTemplate
    from ropewalk.text.grammar import Grammars
    from ropewalk.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A model that is ready to generate. Use it as a context manager, or call `close`.

    Several threads may use one `LLM`; their requests share its steps.

    Parameters
    ----------
    model : str or path, default "smollm2-135m"
        A `.gguf` file, a catalog name, or `hf.co/owner/repo[:file]`. Fetched first if need be.
    n_threads : int, optional
        Threads that compute. Default: the cores that this process may really use.
    context_length : int, optional
        Most tokens of a prompt and its output together. Default: the model's, at most 8,192, and at most what the
        KV cache is said to have room for.
    kv_memory : int, float or str, optional
        Size of the KV cache, over all requests that run at once: bytes, text such as "2GiB" or "500MB", or a share
        of the memory that is free (0.25, "25%"). Default: a quarter of it, but never more than `max_batch` whole
        contexts, and never less than one. What this comes to is `kv_cache_bytes`; the system hands the memory out
        when it is first used.
    kv_tokens : int, optional
        The same in tokens; at most one of the two can be given.
    cache_dtype : str, default "float16"
        Type of the KV cache's elements.
    max_batch : int, default 16
        Most requests that run at once.
    token_budget : int, default 512
        Most tokens in one step: the size of the chunks in which prompts are read.
    kv_cache : bool, default True
        False recomputes everything before each token: the same text, slowly. It shows what the cache is for.
    prefix_cache : bool, default True
        Keep what was computed as long as there is room, for later prompts that begin with the same tokens.
    cache_dir : path, optional
        Keep it in this folder as well, for later processes that open the same model with the same `cache_dtype`. Who
        can write there can change what is generated, and who can read there learns prompts: it is made for you alone.
    cache_dir_size : int, float or str, default "4GiB"
        Most bytes of all models in that folder, written as `kv_memory`; a share is one of the disk's free bytes. The
        least recently used go first.
    draft : str, path or Drafter, optional
        Speculative decoding: guess the next tokens, and check several at once. The tokens stay the same; they come
        sooner where guesses are often right, and where they are not, guessing stops by itself. "lookup" guesses from
        the text so far; anything else names a smaller draft model of the same vocabulary, as `model` does.
    draft_tokens : int, optional
        Most guesses for one request in one step, 1 to 63. Default: 15 of a lookup, 7 of a draft model.
    rope_scaling : mapping, optional
        Rotary scaling in place of the file's, as in a Hugging Face configuration: `{"rope_type": "yarn", "factor": 4}`.
        The model's context becomes what the scheme reaches. `ropewalk.model.rope` has the schemes; "none" takes the
        file's away.
    rope_base : float, optional
        Rotary base in place of the file's.
    quantize : str, optional
        "q8", "q6", "q5" or "q4", or a type that `ropewalk quantize` knows: quantize the weights while they are
        loaded, where that makes them smaller.
    adapters : mapping of str to path, optional
        Low-rank adapters (LoRA) by the names that `SamplingParams(adapter=...)` takes: GGUF files, or folders as the
        PEFT library writes them. Each request has one or none, and those of one step may differ.
    progress : callable (what: str, done: int, total: int), optional
        Told about what takes long: a download, packing, compilation.

    Raises
    ------
    ModelNotFoundError, DownloadError
        If the model cannot be had.
    CheckpointError, UnsupportedModelError
        If its file is broken, or is of a kind that is not implemented.
    InvalidParameterError
        If one of the other parameters has a value that is not allowed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        n_threads: int | None = None,
        context_length: int | None = None,
        kv_memory: str | float | None = None,
        kv_tokens: int | None = None,
        cache_dtype: str = "float16",
        max_batch: int = 16,
        token_budget: int = 512,
        kv_cache: bool = True,
        prefix_cache: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_dir_size: str | float | None = None,
        draft: Draft | None = None,
        draft_tokens: int | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        rope_base: float | None = None,
        quantize: str | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        progress: Progress | None = None,
    ) -> None:
        from ropewalk.adapters import open_loras
        from ropewalk.backend.cpu import CpuBackend
        from ropewalk.checkpoint.base import open_checkpoint
        from ropewalk.checkpoint.hub import resolve
        from ropewalk.kernels.team import warn_of_too_many
        from ropewalk.model.config import ModelConfig
        from ropewalk.model.rope_settings import override_rope
        from ropewalk.text.chat import ChatTemplate
        from ropewalk.text.tokenizer import Tokenizer

        with ExitStack() as resources:
            checkpoint = resources.enter_context(open_checkpoint(resolve(model, progress=progress)))
            if quantize is not None:
                from ropewalk.quantize import Requantized

                checkpoint = resources.enter_context(Requantized(checkpoint, quantize, n_threads=n_threads))
            config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
            config = override_rope(config, rope_scaling, rope_base)
            tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
            template = ChatTemplate.from_metadata(checkpoint.metadata)
            if n_threads is not None:
                check_count("n_threads", n_threads)
                warn_of_too_many(n_threads)
            check_context(context_length, config.context_length)  # packing takes a while: refuse before it
            check_draft(draft, draft_tokens, kv_cache=kv_cache)
            if draft is not None:
                check_count("token_budget", token_budget)
                draft = open_speculator(
                    draft,
                    draft_tokens,
                    tokenizer,
                    config.vocab_size,
                    n_threads=n_threads,
                    token_budget=token_budget,
                    progress=progress,
                )
                resources.callback(draft.drafter.close)
            loras = open_loras(adapters or {}, config, checkpoint)
            backend = CpuBackend(
                checkpoint,
                config,
                n_threads=n_threads,
                progress=_in_steps(progress),
                adapters=list(loras.values()),
            )
            resources.callback(backend.close)
            self._start(
                backend,
                tokenizer,
                template,
                context_length=context_length,
                kv_memory=kv_memory,
                kv_tokens=kv_tokens,
                cache_dtype=cache_dtype,
                max_batch=max_batch,
                token_budget=token_budget,
                kv_cache=kv_cache,
                prefix_cache=prefix_cache,
                cache_dir=cache_dir,
                cache_dir_size=cache_dir_size,
                draft=draft,
                adapters={name: lora.digest for name, lora in loras.items()},
            )
            self._resources = resources.pop_all()

    @classmethod
    def from_parts(
        cls, backend: Backend, tokenizer: Tokenizer, template: ChatTemplate | None = None, **options: Any
    ) -> Self:
        """Make an `LLM` of your own backend, tokenizer and chat template; `options` are those of `LLM`."""
        llm = cls.__new__(cls)
        llm._start(backend, tokenizer, template, **options)
        llm._resources = ExitStack()
        llm._resources.callback(backend.close)
        if llm._speculator is not None:
            llm._resources.callback(llm._speculator.drafter.close)
        return llm

    def _start(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        context_length: int | None = None,
        kv_memory: str | float | None = None,
        kv_tokens: int | None = None,
        cache_dtype: str = "float16",
        max_batch: int = 16,
        token_budget: int = 512,
        kv_cache: bool = True,
        prefix_cache: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_dir_size: str | float | None = None,
        draft: Draft | None = None,
        draft_tokens: int | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        check_count("token_budget", token_budget)
        check_draft(draft, draft_tokens, kv_cache=kv_cache)
        speculator = None
        if draft is not None:
            speculator = open_speculator(
                draft,
                draft_tokens,
                tokenizer,
                backend.config.vocab_size,
                n_threads=None,
                token_budget=token_budget,
            )
        draft_page_bytes = 0 if speculator is None else speculator.drafter.page_bytes(cache_dtype)
        size = cache_size(
            model_context=backend.config.context_length,
            page_bytes=backend.page_bytes(cache_dtype) + draft_page_bytes,
            free_bytes=backend.free_bytes,
            max_batch=max_batch,
            context_length=context_length,
            kv_tokens=kv_tokens,
            kv_memory=kv_memory,
        )
        self.backend = backend
        self.tokenizer = tokenizer
        self.chat_template = template
        self.config = backend.config
        self.context_length = size.context_length
        self.max_batch = max_batch
        self._passes = Passes(backend, cache_dtype, token_budget)
        engine = Engine(
            backend,
            context_length=size.context_length,
            kv_tokens=size.kv_tokens,
            cache_dtype=cache_dtype,
            end_ids=tokenizer.eos_ids,
            max_batch=max_batch,
            token_budget=token_budget,
            keep_cache=kv_cache,
            prefix_cache=prefix_cache,
            speculator=speculator,
            adapters=adapters,
            cache_dir=cache_dir,
            cache_dir_bytes=disk_bytes(cache_dir, cache_dir_size),
        )
        self._speculator = speculator
        self.driver = Driver(engine, tokenizer)

    # Generating.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        constraint: Constraint | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt as it stands, without a chat template. All run together in batches.

        Parameters
        ----------
        prompts : str, token ids, or a sequence of either
            In a string, special tokens such as `<|im_start|>` are recognised, and the model's BOS token is
            put first if the model wants one. Token ids are used as they are.
        params : SamplingParams, or one for each prompt
            Default: `SamplingParams()`.
        priority : int, or one for each prompt
            Smaller ones run first, ahead also of requests that other threads have waiting.
        constraint : Constraint, optional
            What every output must follow, made by `grammars`.

        Returns
        -------
        list of RequestOutput
            In the order of the prompts. A request that fails while it runs has `finish_reason` "error" and
            the exception in `error`, and a warning is given; the others are not affected.

        Raises
        ------
        PromptError, InvalidParameterError
            Before anything runs, if one of the prompts or parameters cannot be used.
        """
        return self._run(prompts, params, priority, constraint)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        priority: int | Sequence[int] = 0,
        constraint: Constraint | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the model's chat template.

        Parameters
        ----------
        messages : sequence of {"role": ..., "content": ...}, or a sequence of such sequences
        params, priority, constraint
            As in `generate`.
        tools : sequence of mappings, optional
            Descriptions of tools, handed to the template.

        Raises
        ------
        TemplateError
            If the model has no template, or it refuses the messages.
        PromptError, InvalidParameterError
            As in `generate`.
        """
        several = isinstance(messages, Sequence) and messages and not isinstance(messages[0], Mapping | str)
        conversations: Any = messages if several else [messages]
        prompts = [self._render(conversation, tools) for conversation in conversations]
        return self._run(prompts, params, priority, constraint)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        constraint: Constraint | None = None,
    ) -> Stream:
        """Continue a prompt and yield one chunk for each token as it comes; the last one has the output.

        With several completions (`params.n`) their chunks take turns; `StreamChunk.index` tells them apart.

        Closing the iterator ends the request and frees its pages; `fork` makes another one that goes on from where it
        is. Prompt and parameters are checked at once,
        the request starts with the first `next`.

        Raises
        ------
        PromptError, InvalidParameterError
            At once, as in `generate`.
        GenerationError
            From the iterator, if the request fails.
        """
        return self._stream(
            self._prepare(prompt, params or SamplingParams(), priority, constraint=constraint)
        )

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        priority: int = 0,
        constraint: Constraint | None = None,
    ) -> Stream:
        """Answer a conversation as `chat` does, chunk by chunk as `stream` does."""
        prompt = self._render(messages, tools)
        return self._stream(
            self._prepare(prompt, params or SamplingParams(), priority, constraint=constraint)
        )

    # Text and numbers.

    @cached_property
    def grammars(self) -> Grammars:
        """Makes constraints: `json_object()`, `json_schema(schema)`, `regex(pattern)`, `lark(grammar)`."""
        from ropewalk.text.grammar import Grammars

        return Grammars(self.tokenizer, self.config.vocab_size)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the low-rank adapters that requests can ask for."""
        return tuple(self.driver.engine.adapters)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` and `stream_chat` can be used."""
        return self.chat_template is not None

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes allocated for the KV cache, a draft model's included; 0 once the `LLM` is closed."""
        cache = self.driver.engine.cache
        drafts = 0 if self._speculator is None else self._speculator.drafter.n_bytes
        return 0 if cache is None else int(cache.n_bytes) + drafts

    def statistics(self) -> Statistics:
        """Requests, pages, tokens, times and prefix hits so far."""
        return self.driver.statistics()

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return token ids as `generate` makes them of a prompt.

        Parameters
        ----------
        add_special : bool
            Put the model's BOS token first (and EOS last), if the model wants it.
        parse_special : bool
            Recognise special tokens in the text; False takes them as plain letters.
        """
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids, without special tokens unless `skip_special` is False."""
        return self.tokenizer.decode(token_ids, skip_special=skip_special)

    def logits(self, token_ids: Sequence[int], *, adapter: str | None = None) -> Float32Array:
        """Return the raw logits of every position: row i is the model's prediction after token i.

        Parameters
        ----------
        token_ids : sequence of int, n of them, 1 ... context_length

        Returns
        -------
        float32 [n, vocab_size]

        Raises
        ------
        PromptError
            If there are no tokens, too many, or some outside the vocabulary.
        """
        return np.concatenate([rows.copy() for rows in self.logits_in_parts(token_ids, adapter=adapter)])

    def logits_in_parts(
        self, token_ids: Sequence[int], *, adapter: str | None = None
    ) -> Iterator[Float32Array]:
        """Yield what `logits` returns a few rows at a time, each part valid until the next is asked for.

        No other thread can generate before the iterator has ended or was closed.
        """
        ids = self._checked_ids(token_ids)
        with self.driver.lock:
            self.driver.check_open()
            yield from self._passes.logits(ids, self.driver.engine.adapter_number(adapter))

    def score(
        self, context: Prompt, continuations: Sequence[Prompt], *, adapter: str | None = None
    ) -> list[Score]:
        """How probable each of several continuations of a context is, in the model's own distribution.

        Parameters
        ----------
        context : str or token ids
        continuations : sequence of str, or of token ids
            If they and the context are strings, they are encoded together, since a token may reach across the border:
            what is scored begins with the first token that the context alone does not have.
        adapter : str, optional
            Name of the low-rank adapter to go through.

        Returns
        -------
        list of Score
            Log-probability of every token, natural logarithm.

        Raises
        ------
        PromptError
            If context or a continuation has no tokens, too many together, or some outside the vocabulary.
        """
        pairs = [self._context_and_rest(context, continuation) for continuation in continuations]
        scores: dict[int, Score] = {}
        number = self.driver.engine.adapter_number(adapter)
        with self.driver.lock:
            self.driver.check_open()
            for ids in dict.fromkeys(tuple(ids) for ids, _ in pairs):  # nearly always one
                mine = [i for i, pair in enumerate(pairs) if tuple(pair[0]) == ids]
                found = self._passes.score(ids, [pairs[i][1] for i in mine], number)
                scores.update(zip(mine, found, strict=True))
        return [scores[i] for i in range(len(pairs))]

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool = True,
        adapter: str | None = None,
    ) -> Float32Array:
        """Return a vector for each text, made of the hidden states after the last layer's norm.

        Parameters
        ----------
        texts : str, token ids, or a sequence of either
        pooling : {"mean", "last", "cls"}, optional
            Of all tokens, of the last, or of the first. Default: what the model's file says, otherwise "last", as a
            model that reads forward has seen the whole text only there.
        normalize : bool
            Divide each vector by its Euclidean norm, so that a dot product is the cosine of the angle.
        adapter : str, optional
            Name of the low-rank adapter to go through.

        Returns
        -------
        float32 [n_texts, hidden_size]

        Raises
        ------
        PromptError, InvalidParameterError
        """
        number = self.driver.engine.adapter_number(adapter)
        chosen = pooling or self.config.pooling or "last"
        if chosen not in POOLINGS[1:]:
            raise InvalidParameterError(f"pooling is {pooling!r}; allowed: {', '.join(POOLINGS[1:])}")
        prompts: Any = [texts] if isinstance(texts, str) or not _is_several(texts) else texts
        ids = [self._checked_ids(self.encode(t) if isinstance(t, str) else t) for t in prompts]
        vectors = np.empty((len(ids), self.config.hidden_size), np.float32)
        with self.driver.lock:
            self.driver.check_open()
            for i, text in enumerate(ids):
                states = self._passes.hidden(text, number)
                vectors[i] = (
                    states[-1]
                    if chosen == "last"
                    else states[0]
                    if chosen == "cls"
                    else states.mean(0, dtype=np.float64)
                )
        if normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
        return vectors

    def _checked_ids(self, token_ids: Sequence[int]) -> list[int]:
        _check_kind(token_ids)
        most = self.context_length
        check_prompt(token_ids, vocab_size=self.config.vocab_size, most=most, context_length=most)
        return [int(token) for token in token_ids]

    def _context_and_rest(self, context: Prompt, continuation: Prompt) -> tuple[list[int], list[int]]:
        """Token ids of a context, and of what follows it."""
        before: Sequence[int] = self.encode(context) if isinstance(context, str) else context
        if isinstance(context, str) and isinstance(continuation, str):
            whole: Sequence[int] = self.encode(context + continuation)
            n = next(
                (i for i, pair in enumerate(zip(before, whole, strict=False)) if pair[0] != pair[1]),
                len(before),
            )
        else:
            rest = (
                self.encode(continuation, add_special=False)
                if isinstance(continuation, str)
                else continuation
            )
            _check_kind(rest)
            whole, n = [*self._checked_ids(before), *rest], len(before)
        ids = self._checked_ids(whole)
        if not 0 < n < len(ids):
            what = "context" if n == 0 else "continuation"
            raise PromptError(f"the {what} has no tokens of its own; at least one is needed")
        return ids[:n], ids[n:]

    # Ending.

    def close(self) -> None:
        """Release weights, KV cache and threads. Calling it again does nothing."""
        with self.driver.lock:
            if not self.driver.closed:
                self.driver.close()
                self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Behind the door.

    def _render(self, messages: Conversation, tools: Sequence[Mapping[str, Any]] | None) -> _Rendered:
        if self.chat_template is None:
            raise TemplateError(
                "the model has no chat template: it is a base model, or its file lacks one; give it a plain prompt"
            )
        text = self.chat_template.render(messages, tools=tools)
        return _Rendered(text, encode_chat(self.tokenizer, text), messages, tools)

    def _fit(self, prompt: _Rendered, params: SamplingParams) -> tuple[_Rendered, SamplingParams]:
        """Cut a prompt that `params` let be cut, and say what a slide keeps if they do not; see `truncation`."""
        ids, messages = prompt.ids, prompt.messages
        most = most_tokens(len(ids), params, self.context_length)
        if most == len(ids) and not params.slide:
            return prompt, params
        if params.keep_tokens is None:
            params = replace(params, keep_tokens=self._head(prompt))
        if most == len(ids):
            return prompt, params
        if messages is None:
            cut = replace(prompt, ids=cut_tokens(ids, most, params.keep_tokens or 0))
        else:
            shorter = prompt

            def encode(conversation: Conversation) -> Sequence[int]:
                nonlocal shorter
                shorter = self._render(conversation, prompt.tools)
                return shorter.ids

            cut_turns(messages, ids, most, encode)
            cut = shorter
        n_truncated = len(ids) - len(cut.ids)
        what = "its middle was" if messages is None else "its oldest turns were"
        warnings.warn(
            f"a prompt of {len(ids)} tokens was cut to {len(cut.ids)}: {what} left out",
            TruncationWarning,
            stacklevel=4,
        )
        return replace(cut, n_truncated=n_truncated), params

    def _head(self, prompt: _Rendered) -> int:
        """Tokens at the beginning of a prompt that are never left out."""
        ids, messages = prompt.ids, prompt.messages
        n_start = int(len(ids) > 1 and self.tokenizer.bos_id is not None and ids[0] == self.tokenizer.bos_id)
        if messages is None:
            return n_start

        def encode(conversation: Conversation) -> Sequence[int]:
            return self._render(conversation, prompt.tools).ids

        return max(n_start, head_tokens(messages, ids, encode, self.tokenizer.is_special))

    def _prepare(
        self,
        prompt: Prompt | _Rendered,
        params: SamplingParams,
        priority: int,
        *,
        constraint: Constraint | None = None,
    ) -> _Prepared:
        self.driver.check_open()
        if not isinstance(params, SamplingParams):
            raise InvalidParameterError(f"params is {params!r}; allowed: SamplingParams")
        if isinstance(prompt, str):
            prompt = _Rendered(prompt, self.encode(prompt))
        elif not isinstance(prompt, _Rendered):
            _check_kind(prompt)
            prompt = _Rendered(None, prompt)
        prompt, params = self._fit(prompt, params)
        ids = prompt.ids
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidParameterError(f"priority is {priority!r}; allowed: an integer")
        self.driver.engine.validate(ids, params)
        if constraint is not None and (params.ignore_eos or params.min_tokens):
            name = "ignore_eos" if params.ignore_eos else "min_tokens"
            raise InvalidParameterError(
                f"{name} is {getattr(params, name)!r}; allowed: the default, since a constraint says where outputs end"
            )
        return _Prepared(prompt.text, ids, params, priority, constraint, prompt.n_truncated)

    def _submit(self, prepared: _Prepared) -> Generation:
        generation = self.driver.submit(
            lambda engine: engine.add_request(
                prepared.ids, prepared.params, priority=prepared.priority, constraint=prepared.constraint
            ),
            prepared.text,
        )
        generation.n_truncated = prepared.n_truncated
        return generation

    def _run(
        self, prompts: Any, params: Any, priority: Any, constraint: Constraint | None
    ) -> list[RequestOutput]:
        prepared = [
            self._prepare(*each, constraint=constraint) for each in _together(prompts, params, priority)
        ]
        generations: list[Generation] = []
        try:
            for item in prepared:
                generations.append(self._submit(item))
            for generation in generations:
                while not generation.ended:
                    self.driver.advance(generation)
        finally:
            for generation in generations:
                self.driver.drop(generation)
        outputs = [generation.output for generation in generations]
        for number, output in enumerate(outputs):
            for error in (completion.error for completion in output.outputs):
                if error is not None:
                    warnings.warn(f"prompt {number} failed: {error}", RuntimeWarning, stacklevel=3)
        return outputs

    def _stream(self, prepared: _Prepared) -> Stream:
        return Stream(self.driver, lambda: self._submit(prepared))


@dataclass(frozen=True)
class _Rendered:
    """A prompt as token ids, with what is known of where they come from."""

    text: str | None
    ids: Sequence[int]
    messages: Conversation | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    n_truncated: int = 0


@dataclass(frozen=True)
class _Prepared:
    """A request that was checked and can be submitted."""

    text: str | None
    ids: Sequence[int]
    params: SamplingParams
    priority: int
    constraint: Constraint | None = None
    n_truncated: int = 0


def _together(prompts: Any, params: Any, priority: Any) -> Iterable[tuple[Any, SamplingParams, int]]:
    """Return each prompt with its parameters and its priority."""
    if isinstance(prompts, str):
        prompts = [prompts]
    elif isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise _not_a_prompt(prompts)
    else:
        prompts = list(prompts)
        if prompts and isinstance(prompts[0], int | np.integer):
            prompts = [prompts]
    if not isinstance(params, Sequence):
        params = [SamplingParams() if params is None else params] * len(prompts)
    if not isinstance(priority, Sequence):
        priority = [priority] * len(prompts)
    for name, values in (("params", params), ("priorities", priority)):
        if len(values) != len(prompts):
            raise InvalidParameterError(f"there are {len(values)} {name} for {len(prompts)} prompts")
    return zip(prompts, params, priority, strict=True)


def _in_steps(progress: Progress | None) -> Callable[[str, float], None] | None:
    """Turn a progress of `done` of `total` into one of shares, which a backend reports."""
    if progress is None:
        return None
    return lambda what, share: progress(what, round(100 * share), 100)


def _is_several(texts: Any) -> bool:
    """Whether it is texts, not the token ids of one."""
    return not (len(texts) and isinstance(texts[0], int | np.integer))


def _check_kind(ids: object) -> None:
    if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, bytes):
        raise _not_a_prompt(ids)


def _not_a_prompt(value: object) -> PromptError:
    return PromptError(f"a prompt is {value!r}; allowed: a string or a sequence of token ids")
