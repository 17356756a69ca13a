"""`ropewalk figure cache|rope|sampling|roofline|loop`: a figure into a file, its numbers to stdout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropewalk.cli.bench import numbers
from ropewalk.cli.console import columns, one_line, say, tell, verb
from ropewalk.cli.loading import find, open_llm, progress_on_stderr
from ropewalk.cli.options import DEFAULT_MODEL, Machine, model_argument, takes
from ropewalk.cli.words import add_verb

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ropewalk.plan import ModelShape

GIB = 2**30


@dataclass(frozen=True)
class Sheet:
    """Where a figure goes, and how it looks; None: a name of its own in this folder."""

    path: Path | None
    theme: str | None

    def write(self, name: str, draw: Callable[[str], Figure]) -> None:
        """Draw it in the theme, write it, and say so. The file's name is checked before anything is measured."""
        from ropewalk.figures.style import save

        save(draw(self.theme_of(name)), self.path_of(name))
        tell(f"wrote {self.path_of(name)}")

    def check(self, name: str) -> None:
        """Refuse a file or theme that cannot be, or matplotlib that is not there."""
        from ropewalk.figures.style import canvas, check_file

        check_file(self.path_of(name), self.theme_of(name))
        with canvas("light", 1, 1):
            pass

    def path_of(self, name: str) -> Path:
        """Its file: the given one, or an SVG of this name here."""
        return self.path or Path(f"{name}.svg")

    def theme_of(self, name: str) -> str:
        """Its theme: the given one, or what suits the file."""
        return self.theme or ("auto" if self.path_of(name).suffix.lower() == ".svg" else "light")


def sheet(
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A .svg or .png file. Default: NAME.svg here."),
    ] = None,
    theme: Annotated[
        str | None,
        typer.Option(
            "--theme",
            metavar="THEME",
            help="light, dark, or auto: an SVG that follows the page. Default: auto for SVG, light for PNG.",
        ),
    ] = None,
) -> Sheet:
    """The options of every figure."""
    return Sheet(output, theme)


def model_or_example() -> object:
    """The argument MODEL of figures that have an example of their own."""
    return typer.Argument(
        help="Path, catalog name or hf.co/owner/repo[:file]. Default: the theory's example."
    )


@verb
@takes(sheet=sheet)
def cache(
    model: Annotated[str | None, model_or_example()] = None,
    *,
    cache_type: Annotated[
        str,
        typer.Option(
            "--cache-type", metavar="TYPE,TYPE", help="Of the KV cache, one or several: float16,int8."
        ),
    ] = "float16",
    sheet: Sheet,
) -> None:
    """The KV cache of one sequence against its context.

    Beside it the weights, and two memories.
    """
    from ropewalk import figures

    sheet.check("cache")
    shape = _shape(model) if model else figures.cache.example()
    kinds = cache_type.split(",")
    rows = []
    for line in figures.cache.lines(shape, kinds):
        sizes = [line.token_bytes * n / GIB for n in (4096, 32768, 16 * 4096)]
        rows.append(
            (
                line.label,
                f"{line.token_bytes:,}",
                *(f"{s:.2f} GiB" for s in sizes),
                f"{int(line.crossing_tokens):,}",
            )
        )
    headings = ("", "bytes a token", "4,096 tokens", "32,768 tokens", "16 x 4,096", "weights' size at")
    say(columns([headings, *rows], right=range(1, 6)))
    say(f"weights: {shape.weights.total.n_bytes / 1e9:.2f} GB ({one_line(shape.weight_type)})")
    sheet.write("cache", lambda theme: figures.cache.draw(shape, kinds, theme=theme))


def _shape(model: str) -> ModelShape:
    from ropewalk.checkpoint.base import open_checkpoint
    from ropewalk.plan import shape_of_gguf, shape_of_hf

    path = Path(model)
    if path.suffix == ".json":
        return shape_of_hf(path)
    with open_checkpoint(find(model)) as checkpoint:
        return shape_of_gguf(checkpoint)


@verb
@takes(sheet=sheet)
def rope(model: Annotated[str | None, model_or_example()] = None, *, sheet: Sheet) -> None:
    """Rotary positions: scores that follow from distances alone.

    And how long each pair takes for a full turn.
    """
    from math import ceil, log10

    from ropewalk import figures

    sheet.check("rope")
    shown, context = figures.rope.rotary(), None
    if model:
        from ropewalk.checkpoint.base import open_checkpoint
        from ropewalk.model.config import ModelConfig
        from ropewalk.model.rope import rope_table

        with open_checkpoint(find(model)) as checkpoint:
            config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
            setting, context = config.rope[0], config.context_length
            name = f"{one_line(config.name)}, {setting.width} dimensions, base {setting.base:,.10g}"
            shown = figures.rope.of_table(rope_table(setting, checkpoint.tensor), name)
    rows = [
        (str(offset), f"{scores[0]:.6f}", f"below 1e{ceil(log10(max(shown.deviations[offset], 1e-300)))}")
        for offset, scores in shown.scores.items()
    ]
    say(columns([("tokens apart", "score", "deviation"), *rows], right=range(3)))
    say(f"{len(shown.positions)} positions from {shown.positions[0]} to {shown.positions[-1]}, float64")
    waves = shown.wavelengths
    say(f"wavelengths of {len(waves)} pairs: {waves[0]:.2f} to {waves[-1]:,.0f} tokens")
    sheet.write("rope", lambda theme: figures.rope.draw(shown, context=context, theme=theme))


@verb
@takes(sheet=sheet)
def sampling(
    model: Annotated[str | None, model_or_example()] = None,
    prompt: Annotated[
        str | None, typer.Argument(help="With a model: what the next token is drawn after.")
    ] = None,
    *,
    temperature: Annotated[float, typer.Option("--temperature", help="Of the second panel.")] = 0.5,
    top_p: Annotated[float, typer.Option("--top-p", help="Of the third panel.")] = 0.9,
    sheet: Sheet,
) -> None:
    """What temperature and top-p do to a distribution.

    As the model gave it, at another temperature, and after top-p.
    """
    from ropewalk import figures
    from ropewalk.params import SamplingParams

    SamplingParams(temperature=temperature, top_p=top_p)
    sheet.check("sampling")
    title = None
    if model:
        if not prompt:
            raise typer.BadParameter("a model needs a prompt after it", param_hint="PROMPT")
        with open_llm(model, Machine()) as llm:
            logits = llm.logits(llm.encode(prompt))[-1]
            texts = [
                one_line(llm.decode([i], skip_special=False)).replace(" ", "␣") for i in range(len(logits))
            ]
            title = f"{one_line(llm.config.name)} after: {one_line(prompt)}"
        shown = figures.sampling.sampling(logits, texts, temperature=temperature, mass=top_p)
    else:
        shown = figures.sampling.sampling(temperature=temperature, mass=top_p)
    rows = [
        (
            panel.title,
            f"{panel.probabilities[0]:.2f}",
            f"{panel.entropy:.2f}",
            f"{panel.n_tokens} of {shown.n_tokens}",
        )
        for panel in shown.panels
    ]
    say(columns([("", "most likely", "entropy, nats", "tokens"), *rows], right=(1, 2, 3)))
    sheet.write("sampling", lambda theme: figures.sampling.draw(shown, title=title, theme=theme))


@verb
@takes(sheet=sheet)
def roofline(
    model: Annotated[str, model_argument()] = DEFAULT_MODEL,
    *,
    batch: Annotated[
        str, typer.Option("--batch", "-b", metavar="N,N", help="Sequences decoded together.")
    ] = "1,2,4,8,16",
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", metavar="N,N", help="Prompt lengths to prefill.")
    ] = "16,64,256",
    depth: Annotated[int, typer.Option("--depth", "-d", min=0, help="Tokens already in the cache.")] = 0,
    repeats: Annotated[int, typer.Option("--repeats", "-r", min=1, help="Rounds that are counted.")] = 3,
    sheet: Sheet,
) -> None:
    """Steps of a model under the roof of this machine.

    Both are measured here, as `bench` does.
    """
    from ropewalk import figures
    from ropewalk.bench import Plan, run
    from ropewalk.checkpoint.base import open_checkpoint
    from ropewalk.model.config import ModelConfig

    sheet.check("roofline")
    plan = Plan(numbers(prompt), (depth,), numbers(batch), repeats=repeats)
    with open_checkpoint(find(model)) as checkpoint, progress_on_stderr() as progress:
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        results = run(checkpoint, config, plan, lambda what, share: progress(what, round(100 * share), 100))
    rows = [
        (p.phase, p.label, f"{p.intensity:.1f}", f"{p.rate / 1e9:.1f}", f"{r.bytes_per_s / 1e9:.1f}")
        for p, r in zip(figures.roofline.points(results), results, strict=True)
    ]
    headings = ("", "batch or tokens", "operations a byte", "GFLOP/s", "GB/s")
    say(columns([headings, *rows], right=range(1, 5)))
    say(f"read bandwidth: {max(r.bandwidth for r in results) / 1e9:.1f} GB/s")
    name, here = one_line(config.name), _here(results[0].n_threads)
    sheet.write("roofline", lambda theme: figures.roofline.draw(results, name, machine=here, theme=theme))


@verb
@takes(sheet=sheet)
def loop(
    model: Annotated[str, model_argument()] = DEFAULT_MODEL,
    *,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=2, help="How many to generate.")] = 128,
    repeats: Annotated[
        int, typer.Option("--repeats", "-r", min=1, help="Runs each way; medians are drawn.")
    ] = 1,
    sheet: Sheet,
) -> None:
    """Time of n tokens with the KV cache and without it.

    Measured here; both ways must give the same tokens.
    """
    from ropewalk import figures
    from ropewalk.kernels.team import available_threads

    sheet.check("loop")
    path = find(model)
    with progress_on_stderr() as progress:
        found = figures.loop.measure(
            path, tokens, repeats, progress=lambda what, share: progress(what, round(100 * share), 100)
        )
    rows = _loop_rows(found.with_cache, found.without)
    say(
        columns([("n", "cache", "none", "n tokens, cache", "none", "passes", "times"), *rows], right=range(7))
    )
    name, here = one_line(path.stem), _here(available_threads())
    sheet.write("loop", lambda theme: figures.loop.draw(found, name, machine=here, theme=theme))


def _loop_rows(with_cache: Sequence[float], without: Sequence[float]) -> list[tuple[str, ...]]:
    """Eight rows, or one for each token if there are fewer."""
    n_tokens = len(with_cache)
    rows = []
    for n in sorted({max(1, n_tokens * i // 8) for i in range(1, 9)}):
        near = slice(max(0, n - 8), n)  # the mean of a few neighbours: one token is noise
        each = [1e3 * sum(times[near]) / len(times[near]) for times in (with_cache, without)]
        whole = [sum(times[:n]) for times in (with_cache, without)]
        rows.append(
            (
                str(n),
                *(f"{ms:.1f} ms" for ms in each),
                *(f"{s:.2f} s" for s in whole),
                f"{n} : {n * (n + 1) // 2}",
                f"{whole[1] / whole[0]:.1f}",
            )
        )
    return rows


def _here(n_threads: int) -> str:
    from ropewalk.kernels.cpu import cpu_identity

    return f"{cpu_identity()[0]}, {n_threads} threads"


def figure_app() -> typer.Typer:
    """The sub-verbs as a Typer application."""
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
    for command in (cache, rope, sampling, roofline, loop):
        add_verb(app, command.__name__, command)
    return app
