"""The loop: schedule, forward, sample.

One step runs one flat batch through the backend and draws a token for every request whose known tokens are
all computed. Knows requests, page tables and the sampler; does not know text, files, or how a page is laid out.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.backend.base import Backend, Float32Array, StepBatch, StepRecord
from ropewalk.engine.constraint import Constraint
from ropewalk.engine.draws import seed_of
from ropewalk.engine.overflow import MIN_ROOM, Slide
from ropewalk.engine.pages import PagePool, pages_for
from ropewalk.engine.persist import DEFAULT_DISK_BYTES, PageStore, Shelf, folder_of
from ropewalk.engine.prefix import PrefixCache
from ropewalk.engine.recorder import Recorder
from ropewalk.engine.request import FinishReason, Request
from ropewalk.engine.sampler import choose, logprob
from ropewalk.engine.scheduler import Chunk, Scheduler
from ropewalk.engine.speculative.speculator import Speculator
from ropewalk.engine.statistics import Counters, Statistics
from ropewalk.engine.tables import PageTables
from ropewalk.errors import InvalidParameterError, PromptError
from ropewalk.params import SamplingParams


class Engine:
    """Many requests through one model.

    Parameters
    ----------
    backend : Backend
        The model.
    context_length : int
        Most tokens of one sequence, prompt and output together.
    kv_tokens : int
        Tokens that the KV cache has room for, rounded up to pages; at least `context_length`, so that every
        request that is accepted fits.
    cache_dtype : str
        Element type of the KV cache.
    end_ids : collection of int
        Tokens with which the model ends its output.
    max_batch, token_budget : int
        Most requests, and most tokens, in one step.
    keep_cache : bool
        False recomputes every sequence from its first token for each new one, as if there were no KV cache:
        the same tokens at a cost that grows with the square of the length. For comparison only.
    prefix_cache : bool
        Keep full pages for later requests that begin with the same tokens.
    speculator : Speculator, optional
        Guesses tokens, so that a step can check several of a request. Needs `keep_cache`.
    cache_dir : path, optional
        Keep the pages of the prefix cache in this folder as well, for later processes; see `engine.persist`.
    cache_dir_bytes : int
        Most bytes of them.
    adapters : mapping of str to str, optional
        Names of the backend's low-rank adapters, in its order, and what tells the content of each from any other's.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        context_length: int,
        kv_tokens: int,
        cache_dtype: str = "float16",
        end_ids: Collection[int] = (),
        max_batch: int = 16,
        token_budget: int = 512,
        keep_cache: bool = True,
        prefix_cache: bool = True,
        speculator: Speculator | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_dir_bytes: int = DEFAULT_DISK_BYTES,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        if kv_tokens < context_length:
            raise InvalidParameterError(
                f"kv_tokens is {kv_tokens}; allowed: at least context_length, which is {context_length}"
            )
        self.backend = backend
        self.context_length = context_length
        self.end_ids = frozenset(end_ids)
        self.keep_cache = keep_cache
        self.prefix_cache = prefix_cache and keep_cache
        self.speculator = speculator if keep_cache else None
        self.adapters = dict(adapters or {})
        self._cache_dtype = cache_dtype
        self._max_batch, self._token_budget = max_batch, token_budget
        self._n_pages = pages_for(kv_tokens)
        self.cache: Any = backend.new_cache(self._n_pages, cache_dtype)
        self._shelf = None if cache_dir is None else self._open_shelf(folder_of(cache_dir), cache_dir_bytes)
        self.scheduler = self._new_scheduler()
        self._ids = itertools.count()
        self._counters = Counters()
        self._recorder: Recorder | None = None  # of this step, if one of its requests wants a trace

    def _open_shelf(self, folder: Path, limit_bytes: int) -> Shelf:
        if not self.prefix_cache:
            raise InvalidParameterError(
                f"cache_dir is {str(folder)!r}; allowed: None, without a prefix cache whose pages it could keep"
            )
        store = PageStore(
            folder,
            identity=self.backend.identity(self._cache_dtype),
            page_bytes=self.cache.bytes_per_page,
            limit_bytes=limit_bytes,
        )
        return Shelf(self.cache, store)

    def _new_scheduler(self) -> Scheduler:
        pool = PagePool(self._n_pages)
        tables = PageTables(pool, PrefixCache(pool) if self.prefix_cache else None, self._shelf)
        if self.speculator is not None:
            self.speculator.start(pool, self._cache_dtype, self.backend.config.vocab_size)
        return Scheduler(tables, max_batch=self._max_batch, token_budget=self._token_budget)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do something."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_key: Sequence[tuple[str, str]] = (),
        constraint: Constraint | None = None,
    ) -> Request:
        """Queue a prompt of token ids.

        Parameters
        ----------
        prompt : sequence of int
        params : SamplingParams
        priority : int
            Requests of a smaller one run first; those of the same one, in order of arrival.
        cache_key : sequence of (kind, value)
            What must not be shared across, for example `("salt", user)`: only requests with equal keys, and the same
            adapter, share pages.
        constraint : Constraint, optional
            What the output must follow; every completion gets a fork of it.

        Returns
        -------
        Request
            Of completion 0; `Request.group` has all `params.n` of them.

        Raises
        ------
        PromptError
            If the prompt is empty, leaves no room in the context, or has ids outside the vocabulary.
        InvalidParameterError
            If `params` names token ids outside the vocabulary.
        """
        self.validate(prompt, params)
        max_tokens, slide = self._limits(len(prompt), params)
        seed = fresh_seed() if params.seed is None else params.seed
        adapter = self.adapter_number(params.adapter)
        group: list[Request] = []
        for index in range(params.n):
            tokens = np.zeros(len(prompt) + max_tokens, dtype=np.int32)
            tokens[: len(prompt)] = prompt
            request = Request(
                id=next(self._ids),
                params=params,
                seed=seed_of(seed, index),
                end_ids=frozenset() if params.ignore_eos else self.end_ids,
                tokens=tokens,
                n_prompt=len(prompt),
                n_tokens=len(prompt),
                index=index,
                group=group,
                slide=slide,
                rope_switch=self.backend.config.rope_switch,
                priority=priority,
                adapter=adapter,
                cache_key=self._cache_key(params.adapter, cache_key),
                constraint=constraint.fork() if constraint else None,
                arrived_s=time.perf_counter(),
            )
            group.append(request)
        for request in group:  # all of them, or none if a constraint cannot be forked
            self.scheduler.add(request)
        return group[0]

    def _cache_key(self, adapter: str | None, cache_key: Sequence[tuple[str, str]]) -> bytes:
        """One text for what the caller says and the adapter's content: nothing that the former says is the latter."""
        if adapter is None and not cache_key:
            return b""
        return json.dumps([adapter and self.adapters[adapter], *cache_key]).encode()

    def fork(
        self,
        request: Request,
        params: SamplingParams | None = None,
        *,
        n_output: int | None = None,
        priority: int | None = None,
    ) -> Request:
        """Queue a request that has the prompt of another and its output so far, and goes on by itself.

        It draws what it would have drawn had its output begun like this, whatever becomes of the other: penalties,
        `min_tokens` and `max_tokens` count the output that it took over. All pages of both are shared until one of them
        writes; as long as one is there nothing is computed again.

        Parameters
        ----------
        request : Request
            Waiting, running or ended.
        params : SamplingParams, optional
            For what comes next; `n` must be 1. Default: those of the other, with a fresh seed.
        n_output : int, optional
            How many tokens of its output to take over. Default: all.
        priority : int, optional
            Default: that of the other.

        Raises
        ------
        InvalidParameterError
            If `params` do not fit the model or what is taken over: an end token is in it, it reaches `max_tokens`, or
            it has no log-probabilities such as they ask for, or a constraint is not at this place.
        """
        params = replace(request.params, n=1, seed=None) if params is None else params
        n_output = request.n_output if n_output is None else n_output
        self._validate_fork(request, params, n_output)
        n_tokens = request.n_prompt + n_output
        max_tokens, slide = self._limits(request.n_prompt, params)
        tokens = np.zeros(request.n_prompt + max_tokens, dtype=np.int32)
        tokens[:n_tokens] = request.tokens[:n_tokens]
        group: list[Request] = []
        family = [r for r in request.family if r.finish_reason is None]
        fork = Request(
            id=next(self._ids),
            params=params,
            seed=fresh_seed() if params.seed is None else params.seed,
            end_ids=frozenset() if params.ignore_eos else self.end_ids,
            tokens=tokens,
            n_prompt=request.n_prompt,
            n_tokens=n_tokens,
            group=group,
            family=family,
            slide=slide,
            rope_switch=self.backend.config.rope_switch,
            priority=request.priority if priority is None else priority,
            adapter=request.adapter,
            cache_key=request.cache_key,
            constraint=request.constraint.fork() if request.constraint else None,
            n_told=n_output,
            logprobs=[] if params.logprobs is None else request.logprobs[:n_output],
            arrived_s=time.perf_counter(),
        )
        group.append(fork)
        family.append(fork)
        for relative in family:
            relative.family = family
        self.scheduler.add(fork)
        return fork

    def validate(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise what `add_request` would raise, without adding anything."""
        check_prompt(
            prompt,
            vocab_size=self.backend.config.vocab_size,
            most=self.context_length - 1,
            context_length=self.context_length,
        )
        self._validate_params(params)

    def adapter_number(self, name: str | None) -> int:
        """Number of an adapter, -1 for None; raises InvalidParameterError unless there is one of this name."""
        if name is None:
            return -1
        if name not in self.adapters:
            known = ", ".join(map(repr, self.adapters)) or "None, since the model was opened without adapters"
            raise InvalidParameterError(f"adapter is {name!r}; allowed: {known}")
        return list(self.adapters).index(name)

    def _validate_params(self, params: SamplingParams) -> None:
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_ids)):
            for token in ids:
                if token >= self.backend.config.vocab_size:
                    raise InvalidParameterError(
                        f"{name} has token id {token}; allowed: 0 ... {self.backend.config.vocab_size - 1}"
                    )
        self.adapter_number(params.adapter)
        most = self.context_length - MIN_ROOM
        if params.slide and most < 0:
            raise InvalidParameterError(
                f"slide is True in a context of {self.context_length}; allowed: in one of at least {MIN_ROOM}"
            )
        if params.slide and (params.keep_tokens or 0) > most:
            raise InvalidParameterError(
                f"keep_tokens is {params.keep_tokens}; allowed with slide: at most {most}, in a context of "
                f"{self.context_length}"
            )

    def _validate_fork(self, request: Request, params: SamplingParams, n_output: int) -> None:
        self._validate_params(params)
        if params.n != 1:
            raise InvalidParameterError(f"n is {params.n}; allowed for a fork: 1")
        if params.adapter != request.params.adapter:
            raise InvalidParameterError(
                f"adapter is {params.adapter!r}; allowed for this fork: {request.params.adapter!r}"
            )
        if not 0 <= n_output <= request.n_output:
            raise InvalidParameterError(f"n_output is {n_output}; allowed: 0 ... {request.n_output}")
        max_tokens, _ = self._limits(request.n_prompt, params)
        if n_output >= max_tokens:
            raise InvalidParameterError(
                f"max_tokens is {max_tokens}; allowed for this fork: more than the {n_output} that it takes over"
            )
        ends = params.stop_ids | (frozenset() if params.ignore_eos else self.end_ids)
        if found := [token for token in request.output[:n_output] if token in ends]:
            raise InvalidParameterError(
                f"the output to be forked has the end token {found[0]}; allowed: with ignore_eos, or before it"
            )
        if request.constraint is not None and (n_output != request.n_told or request.constraint.ended):
            raise InvalidParameterError(
                f"n_output is {n_output}; allowed under a constraint: the {request.n_told} that it was told, "
                "and before its end"
            )
        if n_output and params.logprobs not in (None, request.params.logprobs):
            raise InvalidParameterError(
                f"logprobs is {params.logprobs}; allowed for this fork: {request.params.logprobs}, or None"
            )

    def _limits(self, n_prompt: int, params: SamplingParams) -> tuple[int, Slide | None]:
        """Most tokens of an output, and what happens when the context is full."""
        room = self.context_length - n_prompt
        if not params.slide or params.max_tokens is None:
            return min(params.max_tokens or room, room), None
        return params.max_tokens, Slide(self.context_length, min(params.keep_tokens or 0, n_prompt))

    def step(self) -> list[Request]:
        """Run one batch; return the requests that got a token or failed.

        An exception from the backend, or an interrupt, may leave half a step in the cache: it ends all
        requests with "abort" and is raised again; the engine can be used afterwards.
        """
        started_s = time.perf_counter()
        record = StepRecord()
        self._recorder = None
        try:
            chunks = self.scheduler.schedule()
            if not chunks:
                return []
            if copies := self.scheduler.tables.take_copies():
                self.cache.copy_pages(copies)
            if self.speculator is not None:
                chunks = self.speculator.extend(chunks, self.scheduler.tables, self._token_budget)
            batch = self._batch(chunks)
            forward_s = time.perf_counter()
            if any(chunk.request.params.trace is not None for chunk in chunks):
                self._recorder = Recorder(record, chunks)
                record.lap("schedule")
                logits = self.backend.forward(batch, self.cache, record)
                record.lap("finish")
                pages = {"pages_used": self.scheduler.tables.pool.n_used, "pages_total": self._n_pages}
            else:
                logits = self.backend.forward(batch, self.cache)
            if self.speculator is not None and len(batch.logit_rows) == len(batch.tokens):
                self.speculator.pace.measured(len(batch.tokens), time.perf_counter() - forward_s)
            changed = self._advance(chunks, logits)
            if self._recorder is not None:
                page_bytes = self.cache.bytes_per_page
                self._recorder.finish(self._counters.steps, page_bytes=page_bytes, **pages)
        except BaseException:
            self._abort_all()
            raise
        self._counters.steps += 1
        self._counters.busy_s += time.perf_counter() - started_s
        return changed

    def finish(
        self,
        request: Request,
        reason: FinishReason = "abort",
        stop_reason: int | str | None = None,
        *,
        n_output: int | None = None,
    ) -> None:
        """End a request now, from outside.

        One that has ended already keeps its reason if the new one is "abort"; otherwise the new one counts,
        since a stop string may stand in the last token that fits. It ends after `n_output` tokens, if that is given: a
        step that checks guesses may have drawn some that stand after a stop string.
        """
        if n_output is not None and n_output < request.n_output:
            self._counters.cut(request, request.n_output - n_output)
            request.cut(n_output)
        if request.finish_reason is None:
            self._end(request)
        elif reason == "abort":
            return
        request.finish_reason, request.stop_reason = reason, stop_reason

    def statistics(self) -> Statistics:
        """What was done so far, and what is held now."""
        pool = self.scheduler.tables.pool
        return Statistics(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            preemptions=self.scheduler.n_preempted,
            pages=pool.n_pages,
            pages_used=pool.n_used,
            pages_free=pool.n_free,
            pages_cached=pool.n_idle,
            pages_read=self._shelf.store.pages_read if self._shelf else 0,
            pages_written=self._shelf.store.pages_written if self._shelf else 0,
            **vars(self._counters),
        )

    def close(self) -> None:
        """Let go of the KV cache, once what is to be kept of it on disk is written; the engine is of no more use."""
        if self._shelf is not None:
            self._shelf.store.close()
        self.cache = self._shelf = None

    def check(self) -> None:
        """Prove that pages and queues are consistent; raises AssertionError."""
        self.scheduler.check()

    def _batch(self, chunks: Sequence[Chunk]) -> StepBatch:
        """Lay the chunks out one after another; one that ends its request's tokens wants logits of the last and of
        the guesses after it."""
        now = time.perf_counter()
        counts = [chunk.count + len(chunk.guesses) for chunk in chunks]
        tokens, positions = [], []
        wanted: list[int] = []
        tables = np.zeros((len(chunks), max(len(chunk.request.pages) for chunk in chunks)), dtype=np.int32)
        for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
            request, start = chunk.request, chunk.request.n_computed
            request.started_s = request.started_s or now
            tokens += [request.window[start : start + chunk.count], np.array(chunk.guesses, np.int32)]
            positions.append(np.arange(start, start + count, dtype=np.int32))
            tables[row, : len(request.pages)] = request.pages
            if chunk.count == request.n_pending:
                end = sum(counts[: row + 1])
                wanted += range(end - 1 - len(chunk.guesses), end)
        return StepBatch(
            tokens=np.concatenate(tokens),
            positions=np.concatenate(positions),
            sequences=np.repeat(np.arange(len(chunks), dtype=np.int32), counts),
            page_tables=tables,
            logit_rows=np.array(wanted, dtype=np.int32),
            lengths=np.array([c.request.n_window + len(c.guesses) for c in chunks], dtype=np.int32),
            adapters=np.repeat(np.array([c.request.adapter for c in chunks], dtype=np.int32), counts),
        )

    def _advance(self, chunks: Sequence[Chunk], logits: Float32Array) -> list[Request]:
        """Count the chunks as computed, and draw for each request that has no pending token left."""
        rows = iter(logits)
        changed = []
        for chunk in chunks:
            request = chunk.request
            self.scheduler.tables.commit(request, chunk.count)
            self._counters.computed_tokens += chunk.count + len(chunk.guesses)
            if request.n_pending == 0:
                self._draw_run(chunk, rows)
                changed.append(request)
            if request.finish_reason is not None:
                self._end(request)
        return changed

    def _draw_run(self, chunk: Chunk, rows: Iterator[Float32Array]) -> None:
        """Draw one token, and one more after each guess that turns out right; then keep what was computed of them."""
        request, tables = chunk.request, self.scheduler.tables
        before, n_dropped, was_long = request.n_tokens, request.n_dropped, request.is_long
        going = True
        for guess in (*chunk.guesses, None):
            logits = next(rows)  # also those that are of no use
            if going:
                self._draw(request, logits)
                going = request.finish_reason is None and request.tokens[request.n_tokens - 1] == guess
        if request.n_dropped > n_dropped or request.is_long != was_long or not self.keep_cache:
            tables.drop(request)
        elif self.speculator is not None:
            tables.commit(request, max(0, request.n_tokens - before - 1))
            tables.trim(request)
        if self.speculator is not None:
            drawn = request.tokens[before : request.n_tokens].tolist()
            self._counters.drafted_tokens += len(chunk.guesses)
            self._counters.accepted_tokens += self.speculator.settle(chunk, drawn)

    def _end(self, request: Request) -> None:
        self.scheduler.remove(request)
        self._counters.ended(request)

    def _draw(self, request: Request, logits: Float32Array) -> None:
        """Draw and append one token. A failure here is this request's alone."""
        recorder = self._recorder
        try:
            if recorder is not None:
                recorder.before_draw()
            token = choose(
                logits, request.params, request.context, seed=request.seed, position=request.n_tokens
            )
            if recorder is not None:
                recorder.after_draw(request, logits, token)
            if request.params.logprobs is not None:
                request.logprobs.append(logprob(logits, token, request.params.logprobs))
            request.append(token)
        except Exception as error:
            request.finish_reason, request.error = "error", error
        request.last_token_s = time.perf_counter()
        request.first_token_s = request.first_token_s or request.last_token_s
        if request.error is None:
            self._counters.drawn(request)

    def _abort_all(self) -> None:
        """End everything and forget every page, since any of this may be half done."""
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            request.finish_reason = request.finish_reason or "abort"
            request.pages, request.nodes = [], []
            self._counters.ended(request)
        n_preempted = self.scheduler.n_preempted
        self.scheduler = self._new_scheduler()
        self.scheduler.n_preempted = n_preempted


def fresh_seed() -> int:
    """A seed from the operating system."""
    return int.from_bytes(os.urandom(8), "little")


def check_prompt(prompt: Sequence[int], *, vocab_size: int, most: int, context_length: int) -> None:
    """Raise PromptError unless the prompt has 1 ... `most` token ids of the vocabulary."""
    if len(prompt) == 0:
        raise PromptError("the prompt has no tokens; at least one is needed")
    if len(prompt) > most:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens; at most {most} fit into a context of {context_length}"
        )
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise PromptError(f"the prompt has {token!r} among its token ids; allowed: integers")
        if not 0 <= token < vocab_size:
            raise PromptError(f"the prompt has token id {token}; allowed: 0 ... {vocab_size - 1}")
