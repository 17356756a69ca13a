"""`ropewalk list`: the models in the cache, and the catalog's that are not."""

from __future__ import annotations

from typing import Annotated

import typer

from ropewalk.cli.console import byte_size, columns, one_line, say, verb, write_json


@verb
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """List the models in the cache, and those to be had."""
    from ropewalk.checkpoint import hub

    here = hub.list_models()
    names = {model.name for model in here}
    missing = [entry for entry in hub.CATALOG.values() if entry.name not in names]
    if as_json:
        write_json(
            {
                "cached": [
                    {"name": m.name, "bytes": m.n_bytes, "source": m.source, "path": str(m.path)}
                    for m in here
                ],
                "available": [{"name": e.name, "bytes": e.n_bytes, "source": e.source} for e in missing],
            }
        )
        return
    rows = [("MODEL", "SIZE", "WHERE")]
    rows += [(one_line(m.name), byte_size(m.n_bytes), one_line(m.path)) for m in here]
    rows += [(e.name, byte_size(e.n_bytes), f"(ropewalk pull {e.name})") for e in missing]
    say(columns(rows, right=(1,)))
