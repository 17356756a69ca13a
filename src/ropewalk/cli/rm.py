"""`ropewalk rm`: delete models from the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from ropewalk.cli.console import byte_size, one_line, tell, verb


@verb
def remove(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="Names as `ropewalk list` prints them.")
    ],
) -> None:
    """Delete models from the cache. Files elsewhere are never deleted."""
    from ropewalk.checkpoint import hub

    for model in models:
        gone = hub.remove(model)
        tell(f"removed {one_line(gone.name)} ({byte_size(gone.n_bytes)})")
