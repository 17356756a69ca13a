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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def build() -> typer.Typer:
    """The whole command line as a Typer application."""
    app = typer.Typer(
        name="ropewalk",
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_before_verbs)
    app.command("run")(run.run)
    app.command("chat")(chat.chat)
    app.command("serve")(serve.serve)
    app.command("batch")(batch.batch)
    app.command("pull")(pull.pull)
    app.command("list")(list_.list_models)
    app.command("rm")(rm.remove)
    app.command("inspect")(inspect_.inspect)
    app.command("quantize")(quantize.quantize)
    app.command("imatrix")(imatrix.imatrix)
    app.command("bench")(bench.bench)
    app.command("explain")(explain.explain)
    app.add_typer(figure.figure_app(), name="figure", help="Draw a figure into a file; print its numbers.")
    app.command("plan")(plan.plan)
    app.add_typer(verify.app, name="verify")
    app.command("warmup")(warmup.warmup)
    app.command("embed")(embed.embed)
    app.command("perplexity")(perplexity.perplexity)
    app.command("kl")(kl.kl)
    app.command("lm-eval", context_settings=lm_eval.PASSED_ON)(lm_eval.lm_eval)
    app.command("doctor")(doctor.doctor)
    return app
