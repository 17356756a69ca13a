"""`ropewalk pull`: fetch a model into the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from ropewalk.cli.console import one_line, say, verb
from ropewalk.cli.loading import progress_on_stderr
from ropewalk.cli.options import DEFAULT_MODEL


@verb
def pull(
    model: Annotated[
        str,
        typer.Argument(
            help=f"Catalog name or hf.co/owner/repo[:file]. Default: {DEFAULT_MODEL}.", show_default=False
        ),
    ] = DEFAULT_MODEL,
) -> None:
    """Fetch a model into the cache and print where it is. One that is there already is checked."""
    from ropewalk.checkpoint import hub

    with progress_on_stderr() as progress:
        path = hub.pull(model, progress=progress)
    say(one_line(path))
