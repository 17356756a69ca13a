"""The models of a server, by name; and how many requests each may have."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ropewalk.api.bodies import ModelBody, now
from ropewalk.api.errors import ApiError, no_such_model
from ropewalk.errors import InvalidParameterError

if TYPE_CHECKING:
    from ropewalk.async_engine import AsyncEngine
    from ropewalk.llm import LLM


@dataclass
class Served:
    """One model.

    Attributes
    ----------
    name : str
    engine : AsyncEngine
    capacity : int
        Completions that may run or wait.
    taken : int
        Those that do.
    """

    name: str
    engine: AsyncEngine
    capacity: int
    taken: int = 0
    created: int = field(default_factory=now)
    _mean_s: float = 1.0

    @contextmanager
    def place(self, n: int) -> Iterator[None]:
        """Take n places for as long as the context lasts.

        Raises
        ------
        ApiError
            429 with Retry-After if there are not so many, 400 if there never are.
        """
        if n > self.capacity:
            raise ApiError(f"the request asks for {n} completions; this server has room for {self.capacity}")
        if self.taken + n > self.capacity:
            wait = min(60, max(1, math.ceil(self._mean_s)))
            message = f"{self.name} is busy: {self.taken} completions run or wait; try again in {wait} s"
            raise ApiError(message, status=429, code="queue_full", headers={"Retry-After": str(wait)})
        self.taken += n
        started = time.monotonic()
        try:
            yield
        finally:
            self.taken -= n
            self._mean_s += 0.1 * (time.monotonic() - started - self._mean_s)


class Models:
    """Finds models by the names that clients use.

    Parameters
    ----------
    served : mapping of name to Served
        The first one is meant by a request that names none.
    aliases : mapping of other names to these
    """

    def __init__(self, served: Mapping[str, Served], aliases: Mapping[str, str]) -> None:
        self.served = dict(served)
        adapters = {name: owner for owner, each in served.items() for name in each.engine.llm.adapters}
        if both := (adapters.keys() & served.keys()) | (adapters.keys() & aliases.keys()):
            raise InvalidParameterError(
                f"the name {min(both)!r} is one of an adapter and of a model; allowed: either"
            )
        self._names = {name: name for name in served} | adapters | dict(aliases)

    @property
    def names(self) -> list[str]:
        """All names, aliases included."""
        return list(self._names)

    def get(self, name: str | None) -> Served:
        """Return the model of a name; raises ApiError 404 if nobody has it."""
        if name is None:
            return next(iter(self.served.values()))
        if name not in self._names:
            raise no_such_model(name, self._names)
        return self.served[self._names[name]]

    def find(self, name: str | None) -> tuple[str, LLM]:
        """As `api.tasks` wants it."""
        served = self.get(name)
        return name or served.name, served.engine.llm

    def described(self, name: str) -> ModelBody:
        """What /v1/models says of one."""
        served = self.get(name)
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "ropewalk",
            "root": served.name,
            "max_model_len": served.engine.llm.context_length,
        }
