"""What may be asked of an engine: prompts and parameters are checked, and become requests that have room for an answer.

Knows token ids and the limits of the model; queues nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ropewalk.engine.constraint import Constraint
from ropewalk.engine.draws import seed_of
from ropewalk.engine.overflow import MAX_TOKENS, MIN_ROOM, Slide
from ropewalk.engine.request import Request
from ropewalk.errors import InvalidParameterError, PromptError
from ropewalk.params import SamplingParams

if TYPE_CHECKING:
    from ropewalk.model.config import ModelConfig


class Admission:
    """Makes requests.

    Parameters
    ----------
    config : ModelConfig
    context_length : int
        Most tokens of one sequence, prompt and output together.
    end_ids : collection of int
        Tokens with which the model ends its output.
    adapters : mapping of str to str
        Names of the backend's low-rank adapters, in its order, and what tells the content of each from any other's.
    """

    def __init__(
        self,
        config: ModelConfig,
        context_length: int,
        end_ids: Collection[int],
        adapters: Mapping[str, str],
    ) -> None:
        self.adapters = dict(adapters)
        self._end_ids = frozenset(end_ids)
        self._context_length = context_length
        self._vocab_size, self._rope_switch = config.vocab_size, config.rope_switch
        self._ids = itertools.count()

    def new_requests(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int,
        cache_key: Sequence[tuple[str, str]],
        constraint: Constraint | None,
    ) -> list[Request]:
        """Return a request for each of `params.n` completions; `Engine.add_request` explains the rest."""
        self.validate(prompt, params)
        seed = fresh_seed() if params.seed is None else params.seed
        group: list[Request] = []
        for index in range(params.n):
            request = self._new_request(
                prompt,
                len(prompt),
                params,
                seed=seed_of(seed, index),
                index=index,
                group=group,
                priority=priority,
                adapter=self.adapter_number(params.adapter),
                cache_key=self._cache_key(params.adapter, cache_key),
                constraint=constraint.fork() if constraint else None,
            )
            group.append(request)
        return group

    def _cache_key(self, adapter: str | None, cache_key: Sequence[tuple[str, str]]) -> bytes:
        """One text for what the caller says and the adapter's content: nothing that the former says is the latter."""
        if adapter is None and not cache_key:
            return b""
        return json.dumps([adapter and self.adapters[adapter], *cache_key]).encode()

    def fork(self, request: Request, params: SamplingParams, n_output: int, priority: int | None) -> Request:
        """Return a request that has taken over `n_output` tokens of another; `Engine.fork` explains the rest."""
        self._validate_fork(request, params, n_output)
        group: list[Request] = []
        family = [r for r in request.family if r.finish_reason is None]
        fork = self._new_request(
            request.tokens[: request.n_prompt + n_output],
            request.n_prompt,
            params,
            seed=fresh_seed() if params.seed is None else params.seed,
            group=group,
            family=family,
            priority=request.priority if priority is None else priority,
            adapter=request.adapter,
            cache_key=request.cache_key,
            constraint=request.constraint.fork() if request.constraint else None,
            n_told=n_output,
            logprobs=[] if params.logprobs is None else request.logprobs[:n_output],
        )
        group.append(fork)
        family.append(fork)
        for relative in family:
            relative.family = family
        return fork

    def _new_request(self, known: ArrayLike, n_prompt: int, params: SamplingParams, **others: Any) -> Request:
        """A request whose first tokens are known, with room for the others."""
        max_tokens, slide = self._limits(n_prompt, params)
        tokens = np.zeros(n_prompt + max_tokens, dtype=np.int32)
        n_tokens = len(np.asarray(known))
        tokens[:n_tokens] = known
        return Request(
            id=next(self._ids),
            params=params,
            end_ids=self._ends(params),
            tokens=tokens,
            n_prompt=n_prompt,
            n_tokens=n_tokens,
            slide=slide,
            rope_switch=self._rope_switch,
            arrived_s=time.perf_counter(),
            **others,
        )

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self._end_ids

    def validate(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise what `new_requests` would raise of a prompt and its parameters."""
        check_prompt(
            prompt,
            vocab_size=self._vocab_size,
            most=self._context_length - 1,
            context_length=self._context_length,
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
                if token >= self._vocab_size:
                    raise InvalidParameterError(
                        f"{name} has token id {token}; allowed: 0 ... {self._vocab_size - 1}"
                    )
        self.adapter_number(params.adapter)
        most = self._context_length - MIN_ROOM
        if params.slide and most < 0:
            raise InvalidParameterError(
                f"slide is True in a context of {self._context_length}; allowed: in one of at least {MIN_ROOM}"
            )
        if params.slide and (params.max_tokens or 0) > MAX_TOKENS:
            raise InvalidParameterError(
                f"max_tokens is {params.max_tokens}; allowed with slide: at most {MAX_TOKENS}"
            )
        if params.slide and (params.keep_tokens or 0) > most:
            raise InvalidParameterError(
                f"keep_tokens is {params.keep_tokens}; allowed with slide: at most {most}, in a context of "
                f"{self._context_length}"
            )

    def _validate_fork(self, request: Request, params: SamplingParams, n_output: int) -> None:
        self._validate_params(params)
        if params.n != 1:
            raise InvalidParameterError(f"n is {params.n}; allowed for a fork: 1")
        if params.prompt_logprobs is not None:
            raise InvalidParameterError(
                f"prompt_logprobs is {params.prompt_logprobs}; allowed for a fork: None, as its prompt has been read"
            )
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
        ends = params.stop_ids | self._ends(params)
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
        room = self._context_length - n_prompt
        if not params.slide or params.max_tokens is None:
            return min(params.max_tokens or room, room), None
        return params.max_tokens, Slide(self._context_length, min(params.keep_tokens or 0, n_prompt))


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
