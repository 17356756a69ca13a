"""The front door: `LLM` opens a model and turns prompts into text.

It joins what the rooms behind it do: `opening` makes its parts, `prompts` makes requests, an `Engine` runs them,
stepped by a `Driver`, and `generation` makes text of their tokens. Nothing is done here but that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from ropewalk.backend.base import Backend, Float32Array
from ropewalk.closing import Closing
from ropewalk.driver import Driver
from ropewalk.engine.statistics import Statistics
from ropewalk.errors import InvalidParameterError, PromptError, warn
from ropewalk.generation import Generation
from ropewalk.model.config import POOLINGS
from ropewalk.opening import Parts, open_parts, speculator_of
from ropewalk.options import (
    DEFAULT_MODEL,
    EngineKeywords,
    EngineOptions,
    LLMKeywords,
    LLMOptions,
    options_of,
    signature,
)
from ropewalk.outputs import RequestOutput
from ropewalk.params import SamplingParams
from ropewalk.passes import Passes, Score
from ropewalk.prompts import Prepared, Prompt, Prompts
from ropewalk.stream import Stream
from ropewalk.truncation import Conversation

if TYPE_CHECKING:
    from ropewalk.engine.constraint import Constraint
    from ropewalk.text.chat import ChatTemplate
    from ropewalk.text.grammar import Grammars
    from ropewalk.text.tokenizer import Tokenizer


class LLM(Closing):
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

    __signature__ = signature()

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **options: Unpack[LLMKeywords]) -> None:
        chosen = options_of(LLMOptions, options)
        with ExitStack() as resources:
            self._start(open_parts(model, chosen, resources), chosen)
            self._resources = resources.pop_all()

    @classmethod
    def from_parts(
        cls,
        backend: Backend,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        *,
        adapters: Mapping[str, str] | None = None,
        **options: Unpack[EngineKeywords],
    ) -> Self:
        """Make an `LLM` of your own backend, tokenizer and chat template, which it closes at its end.

        Parameters
        ----------
        adapters : mapping of str to str, optional
            Names of the backend's low-rank adapters, in its order, and what tells the content of each from any other's.
        **options
            Those of `LLM` that do not say how a model's file is read.
        """
        llm = cls.__new__(cls)
        chosen = options_of(EngineOptions, options)
        with ExitStack() as resources:
            speculator = speculator_of(chosen, tokenizer, backend.config.vocab_size, resources)
            name = type(backend).__name__
            llm._start(Parts(backend, tokenizer, template, adapters or {}, speculator, name), chosen)
            resources.callback(backend.close)
            llm._resources = resources.pop_all()
        return llm

    def _start(self, parts: Parts, options: EngineOptions) -> None:
        self.backend = parts.backend
        self.config = parts.backend.config
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.template
        self.max_batch = options.max_batch
        self._speculator = parts.speculator
        self.driver = Driver(parts.new_engine(options), parts.tokenizer)
        self.context_length = self.driver.engine.context_length
        self._shown = (
            f"{parts.name}, context_length={self.context_length}, cache_dtype={options.cache_dtype!r}"
        )
        self.prompts = Prompts(self.driver, parts.template)
        self._passes = Passes(parts.backend, options.cache_dtype, options.token_budget)

    def __repr__(self) -> str:
        return f"LLM({self._shown}{', closed' if self.driver.closed else ''})"

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
        return self._run(self.prompts.prepare_all(prompts, params, priority, constraint))

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
        return self._run(self.prompts.prepare_chats(messages, params, tools, priority, constraint))

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
        is. Prompt and parameters are checked at once, the request starts with the first `next`.

        Raises
        ------
        PromptError, InvalidParameterError
            At once, as in `generate`.
        GenerationError
            From the iterator, if the request fails.
        """
        return self._stream(self.prompts.prepare(prompt, params, priority=priority, constraint=constraint))

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
        return self._stream(
            self.prompts.prepare_chat(messages, params, tools=tools, priority=priority, constraint=constraint)
        )

    def _run(self, prepared: Sequence[Prepared]) -> list[RequestOutput]:
        generations: list[Generation] = []
        try:
            for item in prepared:
                generations.append(item.submit(self.driver))
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
                    warn(f"prompt {number} failed: {error}", RuntimeWarning)
        return outputs

    def _stream(self, prepared: Prepared) -> Stream:
        return Stream(self.driver, lambda: prepared.submit(self.driver))

    # Text and numbers.

    @cached_property
    def grammars(self) -> Grammars:
        """Makes constraints: `json_object()`, `json_schema(schema)`, `regex(pattern)`, `lark(grammar)`."""
        from ropewalk.text.grammar import Grammars

        return Grammars(self.tokenizer, self.config.vocab_size)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the low-rank adapters that requests can ask for."""
        return tuple(self.driver.engine.admission.adapters)

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

        Raises
        ------
        PromptError
            If it is no text.
        """
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids, without special tokens unless `skip_special` is False.

        Raises
        ------
        PromptError
            If one of them is not of the vocabulary.
        """
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
        ids = self.prompts.checked_ids(token_ids)
        with self.driver.lock:
            self.driver.check_open()
            yield from self._passes.logits(ids, self.driver.engine.admission.adapter_number(adapter))

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
        if isinstance(continuations, str | bytes) or not isinstance(continuations, Iterable):
            raise PromptError(f"continuations is {continuations!r}; allowed: a sequence of them")
        pairs = [self.prompts.context_and_rest(context, continuation) for continuation in continuations]
        scores: dict[int, Score] = {}
        number = self.driver.engine.admission.adapter_number(adapter)
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

        A text is read in steps of `token_budget` tokens, between which requests of other threads get theirs.

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
        number = self.driver.engine.admission.adapter_number(adapter)
        chosen = pooling or self.config.pooling or "last"
        if chosen not in POOLINGS[1:]:
            raise InvalidParameterError(f"pooling is {pooling!r}; allowed: {', '.join(POOLINGS[1:])}")
        ids = self.prompts.several_ids(texts)
        vectors = np.empty((len(ids), self.config.hidden_size), np.float32)
        for vector, text in zip(vectors, ids, strict=True):
            vector[:] = self.driver.run(self._passes.embedding(text, chosen, number))
        if normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
        return vectors

    # Ending.

    def close(self) -> None:
        """Release weights, KV cache and threads. Calling it again does nothing."""
        self.driver.wanted = True
        with self.driver.lock:
            if not self.driver.closed:
                self.driver.close()
                self._resources.close()
