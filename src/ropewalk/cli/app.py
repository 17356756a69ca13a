"""The list of verbs, and the options that stand before a verb."""

from __future__ import annotations

from typing import Annotated

import typer

from ropewalk import __version__
from ropewalk.cli import (
    batch,
    bench,
    chat,
    doctor,
    embed,
    explain,
    figure,
    imatrix,
    inspect_,
    kl,
    list_,
    lm_eval,
    perplexity,
    plan,
    pull,
    quantize,
    rm,
    run,
    serve,
    verify,
    warmup,
)
from ropewalk.cli.words import Verbs, add_verb

HELP = """Text from language models, in pure Python.

MODEL is a path to a .gguf file or to a folder with safetensors, a name from the catalog
(smollm2-135m is the default), or hf.co/owner/repo[:file].
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ropewalk {__version__}")
        raise typer.Exit


def _before_verbs(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def build() -> typer.Typer:
    """The whole command line as a Typer application."""
    app = typer.Typer(
        name="ropewalk",
        cls=Verbs,
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_before_verbs)
    add_verb(app, "run", run.run)
    add_verb(app, "chat", chat.chat)
    add_verb(app, "serve", serve.serve)
    add_verb(app, "batch", batch.batch)
    add_verb(app, "pull", pull.pull)
    add_verb(app, "list", list_.list_models)
    add_verb(app, "rm", rm.remove)
    add_verb(app, "inspect", inspect_.inspect)
    add_verb(app, "quantize", quantize.quantize)
    add_verb(app, "imatrix", imatrix.imatrix)
    add_verb(app, "bench", bench.bench)
    add_verb(app, "explain", explain.explain)
    app.add_typer(figure.figure_app(), name="figure", help="Draw a figure into a file; print its numbers.")
    add_verb(app, "plan", plan.plan)
    app.add_typer(verify.app, name="verify")
    add_verb(app, "warmup", warmup.warmup)
    add_verb(app, "embed", embed.embed)
    add_verb(app, "perplexity", perplexity.perplexity)
    add_verb(app, "kl", kl.kl)
    add_verb(app, "lm-eval", lm_eval.lm_eval, context_settings=lm_eval.PASSED_ON)
    add_verb(app, "doctor", doctor.doctor)
    return app
