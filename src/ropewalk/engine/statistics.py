"""What the engine has done so far, and what it holds now.

`Counters` is the engine's own tally; `Statistics` is a frozen picture of it for everybody else. What a single
request cost is in its own result.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.engine.request import Request


@dataclass
class Counters:
    """Totals since the engine was made; see `Statistics`."""

    steps: int = 0
    busy_s: float = 0.0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    disk_tokens: int = 0
    finished: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0
    later_tokens: int = 0
    later_token_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def drawn(self, request: Request) -> None:
        """Count a token that a request has just got."""
        self.generated_tokens += 1
        if request.n_output > 1:
            return
        self.first_tokens += 1
        self.first_token_s += request.first_token_s - request.arrived_s
        if request.index == 0:
            self.prompt_tokens += request.n_prompt
            self.cached_tokens += request.n_cached
            self.disk_tokens += min(request.n_from_disk, request.n_cached)

    def ended(self, request: Request) -> None:
        """Count a request that has just ended, in whatever way."""
        self.finished += 1
        self.later_tokens += max(0, request.n_output - 1)
        self.later_token_s += request.last_token_s - request.first_token_s

    def cut(self, request: Request, n: int) -> None:
        """Take back the last n tokens of a request, which stand after its end."""
        self.generated_tokens -= n
        if request.finish_reason is not None:
            self.later_tokens -= n


@dataclass(frozen=True)
class Statistics:
    """A picture of an engine.

    Attributes
    ----------
    running, waiting : int
        Requests now.
    preemptions : int
        How often a request had to give up its pages and wait.
    pages, pages_used, pages_free, pages_cached : int
        Pages of the KV cache; of these, in use and free now. Used and free add up to `pages`. `pages_cached` are
        those of the free ones that hold a known beginning and can be shared at once.
    pages_read, pages_written : int
        Pages of the prefix cache that were read from disk and written to it so far.
    steps : int
        Steps so far.
    busy_s : float
        Seconds spent in them.
    computed_tokens : int
        Tokens that went through the model, those computed again after a preemption included.
    generated_tokens : int
        Tokens drawn.
    prompt_tokens, cached_tokens, disk_tokens : int
        Tokens of all prompts read, how many of these were found in the prefix cache, and how many of those on disk.
    finished : int
        Requests that ended, aborted ones included.
    first_tokens, first_token_s : int, float
        Requests that got a token, and the seconds from arrival to it, waiting included, of all of them together.
    later_tokens, later_token_s : int, float
        Tokens after the first of all requests that ended, and the seconds that they took together.
    drafted_tokens, accepted_tokens : int
        Guesses that were checked (`engine.speculative`), and how many of them were right.
    """

    running: int
    waiting: int
    preemptions: int
    pages: int
    pages_used: int
    pages_free: int
    pages_cached: int
    pages_read: int
    pages_written: int
    steps: int
    busy_s: float
    computed_tokens: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    disk_tokens: int
    finished: int
    first_tokens: int
    first_token_s: float
    later_tokens: int
    later_token_s: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that was found in the prefix cache; 0 before the first prompt."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the guesses that were right; 0 before the first."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of work, over all requests; 0 before the first step."""
        return self.generated_tokens / self.busy_s if self.busy_s else 0.0

    @property
    def time_to_first_token_s(self) -> float:
        """Mean seconds from arrival to the first token; 0 before there is one."""
        return self.first_token_s / self.first_tokens if self.first_tokens else 0.0

    @property
    def time_per_token_s(self) -> float:
        """Mean seconds for each token after the first of a request; 0 before one ended."""
        return self.later_token_s / self.later_tokens if self.later_tokens else 0.0
