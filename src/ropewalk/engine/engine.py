"""The loop: schedule, forward, sample.

One step runs one flat batch through the backend and draws a token for every request whose known tokens are
all computed. Knows requests, page tables and the sampler; does not know text, files, how a page is laid out, or
(`admission` does) what may be asked of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropewalk.backend.base import Backend, Float32Array, StepRecord
from ropewalk.engine.admission import Admission
from ropewalk.engine.constraint import Constraint
from ropewalk.engine.layout import lay_out
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
from ropewalk.errors import InvalidParameterError
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
        self.admission = Admission(backend.config, context_length, end_ids, adapters or {})
        self.keep_cache = keep_cache
        self.prefix_cache = prefix_cache and keep_cache
        self.speculator = speculator if keep_cache else None
        self._cache_dtype = cache_dtype
        self._max_batch, self._token_budget = max_batch, token_budget
        self._n_pages = pages_for(kv_tokens)
        self.cache: Any = backend.new_cache(self._n_pages, cache_dtype)
        self._shelf = None if cache_dir is None else self._open_shelf(folder_of(cache_dir), cache_dir_bytes)
        self.scheduler = self._new_scheduler()
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
        group = self.admission.new_requests(
            prompt, params, priority=priority, cache_key=cache_key, constraint=constraint
        )
        for request in group:  # all of them, or none if a constraint cannot be forked
            self.scheduler.add(request)
        return group[0]

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
        params = replace(request.params, n=1, seed=None, prompt_logprobs=None) if params is None else params
        n_output = request.n_output if n_output is None else n_output
        fork = self.admission.fork(request, params, n_output, priority)
        self.scheduler.add(fork)
        return fork

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
            for chunk in chunks:
                chunk.request.started_s = chunk.request.started_s or started_s
            batch = lay_out(chunks)
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

    def _advance(self, chunks: Sequence[Chunk], logits: Float32Array) -> list[Request]:
        """Count the chunks as computed, score prompts, and draw for each request that has no pending token left."""
        rows = iter(logits)
        changed = []
        for chunk in chunks:
            request = chunk.request
            self._score(request, [next(rows) for _ in request.unscored(chunk.count)])
            self.scheduler.tables.commit(request, chunk.count)
            self._counters.computed_tokens += chunk.count + len(chunk.guesses)
            draws = request.n_pending == 0
            if draws:
                self._draw_run(chunk, rows)
            if draws or request.finish_reason is not None:
                changed.append(request)
            if request.finish_reason is not None:
                self._end(request)
        return changed

    def _score(self, request: Request, rows: Sequence[Float32Array]) -> None:
        """Note how probable the next tokens of a prompt are, each by the logits of the token before it."""
        try:
            for logits in rows:
                token = int(request.tokens[len(request.prompt_logprobs) + 1])
                request.prompt_logprobs.append(logprob(logits, token, request.params.prompt_logprobs or 0))
        except Exception as error:
            self._failed(request, error)

    def _draw_run(self, chunk: Chunk, rows: Iterator[Float32Array]) -> None:
        """Draw one token, and one more after each guess that turns out right; then keep what was computed of them."""
        request, tables = chunk.request, self.scheduler.tables
        before, n_dropped, was_long = request.n_tokens, request.n_dropped, request.is_long
        going = request.finish_reason is None
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
            self._failed(request, error)
            return
        _note_time(request)
        self._counters.drawn(request)

    def _failed(self, request: Request, error: Exception) -> None:
        request.finish_reason, request.error = "error", error
        _note_time(request)

    def _abort_all(self) -> None:
        """End everything and forget every page, since any of this may be half done."""
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            request.finish_reason = request.finish_reason or "abort"
            request.pages, request.nodes = [], []
            self._counters.ended(request)
        n_preempted = self.scheduler.n_preempted
        self.scheduler = self._new_scheduler()
        self.scheduler.n_preempted = n_preempted


def _note_time(request: Request) -> None:
    request.last_token_s = time.perf_counter()
    request.first_token_s = request.first_token_s or request.last_token_s
