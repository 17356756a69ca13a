"""/v1/embeddings: texts to vectors. Not a `Task`, since nothing is generated: `texts` go to `LLM.embed` one by one."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from ropewalk.api.bodies import EmbeddingBody, EmbeddingsBody
from ropewalk.api.body import checked
from ropewalk.api.errors import ApiError
from ropewalk.api.requests import EmbeddingRequest
from ropewalk.api.tasks import Find, encoded
from ropewalk.truncation import cut_tokens


class EmbeddingTask:
    """One request.

    Attributes
    ----------
    model, llm, user
        As in `Task`.
    texts : list of token ids
    adapter : str or None
        Name of the low-rank adapter that they go through.
    """

    def __init__(self, body: dict[str, Any], find: Find) -> None:
        request = checked(EmbeddingRequest, body)
        self.model, self.llm = find(request.model)
        self.user = request.user
        self.adapter = request.model if request.model in self.llm.adapters else None
        limit = request.truncate_prompt_tokens
        may_be_cut = limit is not None
        texts = [
            encoded(self.llm, text, may_be_cut=may_be_cut) if isinstance(text, str) else text
            for text in request.texts
        ]
        self.texts = texts if limit is None else [self._cut(ids, limit) for ids in texts]
        self._n_truncated = sum(map(len, texts)) - sum(map(len, self.texts)) if may_be_cut else None
        width = self.llm.config.hidden_size
        if request.dimensions not in (None, width):
            raise ApiError(f"dimensions is {request.dimensions}; this model has {width}", param="dimensions")
        self._base64 = request.encoding_format == "base64"

    def body(self, vectors: Sequence[np.ndarray[Any, np.dtype[np.float32]]]) -> EmbeddingsBody:
        """The answer; a float32 vector [hidden_size] for each text."""
        data: list[EmbeddingBody] = [
            {"object": "embedding", "index": i, "embedding": self._encoded(vector)}
            for i, vector in enumerate(vectors)
        ]
        n_tokens = sum(map(len, self.texts))
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        if self._n_truncated is not None:
            usage["truncated_tokens"] = self._n_truncated
        return {"object": "list", "model": self.model, "data": data, "usage": usage}

    def _cut(self, ids: Sequence[int], limit: int) -> Sequence[int]:
        longest = self.llm.context_length
        if limit > longest:
            message = f"truncate_prompt_tokens is {limit}; this model has a context of {longest}"
            raise ApiError(message, param="truncate_prompt_tokens")
        most = longest if limit == -1 else limit
        n_start = int(ids[:1] == [self.llm.tokenizer.bos_id] and most > 1)
        return cut_tokens(ids, most, n_start)

    def _encoded(self, vector: np.ndarray[Any, np.dtype[np.float32]]) -> list[float] | str:
        if self._base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return [float(value) for value in vector]
