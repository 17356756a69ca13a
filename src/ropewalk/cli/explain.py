"""`ropewalk explain`: one generation, told step by step and token by token."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropewalk.cli.console import byte_size, columns, fields, one_line, say, tell, verb, write_json
from ropewalk.cli.loading import open_llm
from ropewalk.cli.options import Machine, drafting_machine, sampling, takes
from ropewalk.cli.prompt import (
    ModelArgument,
    PromptArgument,
    RawOption,
    SystemOption,
    conversation,
    model_and_text,
)
from ropewalk.errors import GenerationError
from ropewalk.params import SamplingParams

if TYPE_CHECKING:
    from ropewalk import LLM
    from ropewalk.engine.trace import TokenTrace
    from ropewalk.explain import Story

MAX_TOKENS = 8  # by default: a longer story is not read
Rows = Sequence[Sequence[str]]


def short(group: Callable[..., SamplingParams]) -> Callable[..., SamplingParams]:
    """The sampling options, but for the default of `--max-tokens`."""
    signature = inspect.signature(group, eval_str=True)
    changed = [
        p.replace(default=MAX_TOKENS) if p.name == "max_tokens" else p for p in signature.parameters.values()
    ]
    wrapped = functools.wraps(group)(lambda **options: group(**options))
    wrapped.__dict__["__signature__"] = signature.replace(parameters=changed)
    return wrapped


@verb
@takes(params=short(sampling), machine=drafting_machine)
def explain(
    model: ModelArgument = None,
    prompt: PromptArgument = None,
    *,
    system: SystemOption = None,
    raw: RawOption = False,
    candidates: Annotated[
        int, typer.Option("--candidates", min=0, help="Tell of so many of each draw's likeliest tokens.")
    ] = 5,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write a timeline for ui.perfetto.dev or chrome://tracing."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    params: SamplingParams,
    machine: Machine,
) -> None:
    """Generate a few tokens and tell the whole story.

    For each step: its tokens, the bytes of weights and KV cache that it read, milliseconds, and the share of what the
    machine's memory allows, measured around it. For each token: the likeliest candidates before and after every
    sampling knob, what each knob removed, and the entropy. At the end: where the time went.
    """
    from ropewalk.explain import explain as run

    if raw and system is not None:
        raise typer.BadParameter("--raw is without a chat template: it excludes --system")
    if trace is not None and not trace.parent.is_dir():
        raise typer.BadParameter(f"--trace {trace}: there is no folder {trace.parent}")
    model, text = model_and_text(model, prompt)
    params = dataclasses.replace(params, trace=candidates, adapter=machine.adapter)
    with open_llm(model, machine) as llm:
        is_chat = not raw and (system is not None or llm.has_chat_template)
        story = run(llm, conversation(text, system) if is_chat else text, params)
        if trace is not None:
            write_timeline(trace, story, llm)
        if as_json:
            write_json({"file": model, **story.to_dict(llm)})
        else:
            show(story, llm, machine)


def write_timeline(path: Path, story: Story, llm: LLM) -> None:
    """The Chrome trace file.

    Raises
    ------
    GenerationError
        If it cannot be written.
    """
    whole = story.trace.to_chrome(lambda token: llm.decode([token], skip_special=False))
    try:
        path.write_text(json.dumps(whole, allow_nan=False))
    except OSError as error:
        raise GenerationError(f"--trace {path}: {error.strerror}") from None
    tell(f"wrote {path}: open it at https://ui.perfetto.dev")


def show(story: Story, llm: LLM, machine: Machine) -> None:
    """The story as text."""
    say(fields(facts(story, machine)))
    say("\nSteps")
    table(*steps_of(story, llm))
    for number, token in enumerate(story.trace.tokens):
        say("")
        say(heading_of(number, token, llm))
        table(*stages_of(token, story.params, llm))
    say("\nWhere the time went")
    table(*parts_of(story))
    say("")
    say("\n".join(sums_of(story)))
    say(f"\n{one_line(story.output.text)}")


def table(headings: Sequence[str], rows: Rows, left: Sequence[str]) -> None:
    """A table on a terminal that is wide enough, aligned columns elsewhere; columns but `left` are aligned right."""
    plain = columns([headings, *rows], right=[i for i, h in enumerate(headings) if h not in left])
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console()
        if max(map(len, plain.splitlines())) <= console.width:
            drawn = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
            for heading in headings:
                drawn.add_column(Text(heading), justify="left" if heading in left else "right", no_wrap=True)
            for row in rows:
                drawn.add_row(*map(Text, row))
            console.print(drawn)
            return
    say(plain)


def facts(story: Story, machine: Machine) -> dict[str, str]:
    """What the figures hold for."""
    m, c = story.model, story.machine
    elements = f"{m['layers']} layers x {m['kv_heads']} KV heads x {m['head_dim']} x 2 (keys, values)"
    speeds = [sweep.bytes_per_s for sweep in story.sweeps]
    low, high = min(speeds), max(speeds)
    return {
        "model": f"{one_line(m['name'])} ({m['architecture']}): {m['layers']} layers, {m['heads']} heads, "
        f"vocabulary {m['vocab_size']:,}",
        "weights": f"{byte_size(m['weight_bytes'])} packed; each decode step reads all of them",
        "KV cache": f"{m['cache_token_bytes']:,} bytes a token: {elements}, {machine.cache_dtype}; "
        f"pages of {m['page_tokens']} tokens, {byte_size(m['cache_page_bytes'])}",
        "machine": f"{c['cpu']}, {c['threads']} threads, {c['kernels']} kernels",
        "bound": f"these weights can be read at {high / 1e9:.1f} GB/s "
        f"({low / 1e9:.1f} to {high / 1e9:.1f} around the steps)",
    }


def quoted(llm: LLM, token_id: int) -> str:
    """A token's text, in quotes."""
    return json.dumps(one_line(llm.decode([token_id], skip_special=False)), ensure_ascii=False)


def steps_of(story: Story, llm: LLM) -> tuple[Sequence[str], Rows, Sequence[str]]:
    """A row for each step."""
    headings = (
        *("step", "", "positions", "pages", "weights MB", "cache kB", "written kB"),
        *("ms", "GB/s", "of bound", "draws"),
    )
    rows = []
    for number, (step, share) in enumerate(zip(story.trace.steps, story.shares, strict=True)):
        last = step.first_position + step.n_tokens - 1
        drawn = [quoted(llm, t.token_id) for t in story.trace.tokens if t.step is step]
        rows.append(
            (
                str(number),
                f"{step.phase} {step.n_tokens}",
                f"{step.first_position}-{last}" if step.n_tokens > 1 else str(last),
                str(len(step.pages)),
                f"{sum(step.weight_bytes.values()) / 1e6:.2f}",
                f"{step.cache_read_bytes / 1e3:.1f}",
                f"{step.cache_written_bytes / 1e3:.1f}",
                f"{1e3 * step.seconds:.2f}",
                f"{step.bytes_per_s / 1e9:.1f}",
                f"{share:.0%}",
                " ".join(drawn),
            )
        )
    return headings, rows, ("", "draws")


def heading_of(number: int, token: TokenTrace, llm: LLM) -> str:
    """What was drawn."""
    return (
        f"Token {number}: {quoted(llm, token.token_id)} at position {token.position}, "
        f"drawn with probability {token.probability:.3f}"
    )


def stages_of(
    token: TokenTrace, params: SamplingParams, llm: LLM
) -> tuple[Sequence[str], Rows, Sequence[str]]:
    """A row for each sampling knob, a column for each candidate."""
    names = [quoted(llm, candidate.token_id) for candidate in token.candidates]
    rows = []
    for i, stage in enumerate(token.stages):
        value = getattr(params, stage.name, None)
        removed = f"{stage.n_removed} ({stage.removed_probability:.1%})" if stage.n_removed else ""
        rows.append(
            (
                f"  {stage.name}" + (f" {value:g}" if type(value) in (int, float) else ""),
                str(stage.n_candidates),
                removed,
                f"{stage.entropy:.2f}",
                *(f"{c.probabilities[i]:.1%}" if c.probabilities[i] else "-" for c in token.candidates),
            )
        )
    return ("  knob", "candidates", "removed", "nats", *names), rows, ("  knob",)


def parts_of(story: Story) -> tuple[Sequence[str], Rows, Sequence[str]]:
    """A row for each part of a step, its waits for other threads included, and for each group of parts."""
    from ropewalk.engine.trace import GROUPS

    decode = [step for step in story.trace.steps if step.phase == "decode"]
    n = max(1, len(decode))
    n_bytes = {part: sum(step.weight_bytes.get(part, 0) for step in decode) / n for part in GROUPS}
    n_bytes["prepare"] = sum(step.weight_bytes.get("embedding", 0) for step in decode) / n
    n_bytes["attend"] = sum(step.cache_read_bytes for step in decode) / n
    works = [story.part_s(phase) for phase in ("prefill", "decode")]
    waits = [story.wait_s(phase) for phase in ("prefill", "decode")]
    wholes = [sum(parts.values()) for parts in works]

    def row(name: str, parts: Sequence[str]) -> tuple[str, ...]:
        waited = sum(waits[1].get(part, 0.0) for part in parts)
        spans = [
            sum(work.get(part, 0.0) + wait.get(part, 0.0) for part in parts)
            for work, wait in zip(works, waits, strict=True)
        ]
        shares = [f"{span / whole:.1%}" if whole else "" for span, whole in zip(spans, wholes, strict=True)]
        amount = sum(n_bytes[part] for part in parts)
        told = amount >= 5_000  # 0.00 MB says nothing
        return (
            name,
            f"{1e3 * spans[0]:.2f}",
            shares[0],
            f"{1e3 * spans[1] / n:.3f}",
            shares[1],
            f"{1e3 * waited / n:.3f}",
            f"{amount / 1e6:.2f}" if told else "",
            f"{amount / (spans[1] / n) / 1e9:.1f}" if told and spans[1] else "",
        )

    seen = [part for part in GROUPS if part != "wait" and any(part in work for work in works)]
    rows = []
    for group in dict.fromkeys(GROUPS[part] for part in seen):
        members = [part for part in seen if GROUPS[part] == group]
        rows.append(row(group, members))
        if len(members) > 1:
            rows += [row(f"  {part}", [part]) for part in members]
    rows.append(row("all parts", seen))
    headings = ("part", "prefill ms", "share", "decode ms", "share", "of it waiting", "MB", "GB/s")
    return headings, rows, ("part",)


def counted(n: float, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{n:.0f} {what}" + ("" if n == 1 else "s")


def sums_of(story: Story) -> list[str]:
    """The account in sentences."""
    trace, lines = story.trace, []
    for name in ("prefill", "decode"):
        if p := story.phase(name):
            lines.append(
                f"{name}: {counted(p['tokens'], 'token')} in {counted(p['steps'], 'step')}, "
                f"{1e3 * p['seconds']:.1f} ms, {p['tokens_per_s']:.1f} tok/s; a step took {1e3 * p['step_s']:.2f} ms, "
                f"{p['bytes_per_s'] / 1e9:.1f} GB/s, {p['bound_share']:.0%} of the bound (medians)"
            )
    decode = [step for step in trace.steps if step.phase == "decode"]
    if decode:
        sizes = [step.read_bytes for step in decode]
        lines.append(
            f"decode read {sum(sizes):,} bytes: {counted(len(sizes), 'step')} of {min(sizes):,} to {max(sizes):,}"
        )
    last = trace.steps[-1]
    used = last.first_position + last.n_tokens
    lines.append(
        f"cache: {counted(used, 'position')} in {counted(len(last.pages), 'page')} "
        f"({', '.join(map(str, last.pages))}), "
        f"{used * story.model['cache_token_bytes']:,} bytes used of {len(last.pages) * last.page_bytes:,}"
    )
    lines.append(f"read in all {trace.read_bytes:,} bytes, {trace.bytes_per_token:,.0f} for each token drawn")
    return lines
