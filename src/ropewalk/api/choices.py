"""What /v1/chat/completions and /v1/completions share: an answer is a list of choices, whole or in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ropewalk.api.bodies import FINGERPRINT, Event, FinishReason, new_id, now
from ropewalk.api.chat_request import ChatRequest
from ropewalk.api.requests import CompletionRequest
from ropewalk.api.tasks import Find, Task
from ropewalk.outputs import RequestOutput


class ChoicesTask(Task):
    """A task with choices.

    Attributes
    ----------
    prefix : str
        How the answer's `id` begins.
    kind, chunk_kind : str
        The `object` of a whole answer, and of a chunk.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, request: ChatRequest | CompletionRequest, find: Find) -> None:
        self.model, self.llm = find(request.model)
        self.stream, self.user = bool(request.stream), request.user
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._id, self._created = new_id(self.prefix), now()

    def whole(self, choices: Sequence[Any], outputs: Sequence[RequestOutput]) -> Any:
        """The whole answer."""
        return {**self._frame(self.kind), "choices": choices, "usage": self.usage(outputs)}

    def chunk(
        self,
        index: int,
        content: Mapping[str, Any],
        *,
        logprobs: Any = None,
        reason: FinishReason | None = None,
        seed: int | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Event:
        """A chunk that adds `content`, and members of its own (`more`), to one choice."""
        choice = {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": reason,
            **(more or {}),
        }
        if seed is not None:
            choice["seed"] = seed
        usage = {"usage": None} if self._include_usage else {}
        return {**self._frame(self.chunk_kind), "choices": [choice], **usage}

    def end(self, outputs: Sequence[RequestOutput]) -> list[Event]:
        """The usage, if it was asked for."""
        if not self._include_usage:
            return []
        return [{**self._frame(self.chunk_kind), "choices": [], "usage": self.usage(outputs)}]

    def _frame(self, kind: str) -> Event:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }
