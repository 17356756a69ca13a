"""One answer on its way to the reader: streamed text, then what it cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ropewalk.cli.console import write

if TYPE_CHECKING:
    from ropewalk.outputs import RequestOutput, StreamChunk
    from ropewalk.params import SamplingParams


def print_stream(chunks: Iterable[StreamChunk]) -> RequestOutput | None:
    """Write each chunk's text to stdout as it comes, end the line, and return the finished output.

    None if the stream ended before the chunk that carries it.
    """
    text = ""
    output = None
    for chunk in chunks:
        text = chunk.text or text
        write(chunk.text)
        output = chunk.output
    if not text.endswith("\n"):
        write("\n")
    return output


def speed_line(output: RequestOutput, params: SamplingParams) -> str:
    """What an answer cost, in one line, with the seed if one mattered."""
    t = output.timings
    from_disk = f", {t.disk_tokens} on disk" if t.disk_tokens else ""
    cached = f" ({t.cached_tokens} cached{from_disk})" if t.cached_tokens else ""
    parts = [f"prefill {t.prompt_tokens} tokens{cached}, {t.prefill_tps:.1f} tok/s"]
    if t.generated_tokens > 1:
        parts.append(f"decode {t.generated_tokens} tokens, {t.decode_tps:.1f} tok/s")
    if t.drafted_tokens:
        parts.append(f"{t.accepted_tokens} of {t.drafted_tokens} guesses right")
    parts.append(f"first token after {t.time_to_first_token_s:.2f} s")
    if output.finish_reason == "length":
        parts.append("cut at the limit")
    if n_dropped := output.outputs[0].n_dropped:
        parts.append(f"{n_dropped} tokens have left the context")
    if not params.greedy:
        parts.append(f"seed {output.seed}")
    return " | ".join(parts)


def as_dict(output: RequestOutput, model: str) -> dict[str, Any]:
    """An answer as one JSON object; with `logprobs` if they were asked for."""
    t = output.timings
    answer: dict[str, Any] = {
        "model": model,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "seed": output.seed,
        "prompt_token_ids": list(output.prompt_token_ids),
        "n_truncated": output.n_truncated,
        "n_dropped": output.outputs[0].n_dropped,
        "timings": {
            "prompt_tokens": t.prompt_tokens,
            "cached_tokens": t.cached_tokens,
            "disk_tokens": t.disk_tokens,
            "generated_tokens": t.generated_tokens,
            "drafted_tokens": t.drafted_tokens,
            "accepted_tokens": t.accepted_tokens,
            "prefill_s": t.prefill_s,
            "decode_s": t.decode_s,
            "prefill_tps": t.prefill_tps,
            "decode_tps": t.decode_tps,
            "time_to_first_token_s": t.time_to_first_token_s,
        },
    }
    if output.logprobs is not None:
        answer["logprobs"] = [
            {"token_id": p.token_id, "logprob": p.logprob, "rank": p.rank, "top": list(map(list, p.top))}
            for p in output.logprobs
        ]
    return answer
