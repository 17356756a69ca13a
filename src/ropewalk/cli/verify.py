"""`ropewalk verify`: properties that must hold, tried out with numbers. `verify rope`: rotary positions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from ropewalk.cli.console import columns, one_line, say, verb, write_json
from ropewalk.cli.loading import find, progress_on_stderr
from ropewalk.cli.words import add_verb

if TYPE_CHECKING:
    from ropewalk.backend.rope_check import RopeCheck

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def verify() -> None:
    """Try out properties that must hold.

    Exit status 1 if one does not.
    """


@verb
def rope(
    model: Annotated[
        str | None,
        typer.Argument(help="Check the settings of this model. Default: every scheme, layout and width."),
    ] = None,
    *,
    head_dim: Annotated[
        int,
        typer.Option("--head-dim", min=4, max=1024, help="Width of a head, without MODEL: a multiple of 4."),
    ] = 64,
    base: Annotated[float, typer.Option("--base", help="Rotary base, without MODEL.")] = 10_000.0,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of the random query and key.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check that scores of rotated vectors follow from their distance alone.

    In float64 and in the compiled kernel's float32, at positions up to 131,072: scores at a fixed distance, scores at
    no distance, lengths, and dimensions that are not rotated.
    """
    from ropewalk.backend.rope_check import SEED, check_all, shift_deviation

    if head_dim % 4:
        raise typer.BadParameter(f"{head_dim} is no multiple of 4", param_hint="--head-dim")
    if not 1 < base <= 1e15:
        raise typer.BadParameter(f"{base:g} is not above 1", param_hint="--base")
    seed = SEED if seed is None else seed
    with progress_on_stderr() as progress:
        progress("compiling the rotation", 0, 1)
        checks = check_all(head_dim, base, seed) if model is None else check_model(model, seed)
    failed = [check for check in checks if not check.passed]
    largest = shift_deviation(head_dim, base, seed=seed)
    if as_json:
        results = [{**dataclasses.asdict(c), "bound": c.bound, "passed": c.passed} for c in checks]
        write_json({"passed": not failed, "shift_deviation": largest, "checks": results})
    else:
        show(checks)
        if model is None:
            say(
                f"\nwidth {head_dim}, base {base:,g}, distance 4, shifts 0, 8 ... 504 in float64: "
                f"scores differ by {largest:.0e} at most"
            )
        say(f"{len(checks) - len(failed)} of {len(checks)} hold" + ("" if failed else ", all"))
    if failed:
        raise typer.Exit(1)


add_verb(app, "rope", rope)


def check_model(name: str, seed: int) -> list[RopeCheck]:
    """The checks of a model's own settings, up to its own context."""
    from ropewalk.backend.rope_check import check_setting
    from ropewalk.checkpoint.base import open_checkpoint
    from ropewalk.errors import UnsupportedModelError
    from ropewalk.model.config import ModelConfig
    from ropewalk.model.rope import rope_table

    checks: list[RopeCheck] = []
    with open_checkpoint(find(name)) as checkpoint:
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        if not config.rope:
            raise UnsupportedModelError(f"{name} has no rotary positions to verify")
        for number, rope in enumerate(config.rope):
            table = rope_table(rope, checkpoint.tensor, config.context_length)
            label = f"layers with a window, base {rope.base:g}" if number else f"base {rope.base:g}"
            label += f", {rope.scaling.name}" if rope.scaling else ""
            reach = max(0, config.context_length - 5)
            checks += check_setting(label, rope, table, config.head_dim, seed, reach)
    return checks


def show(checks: list[RopeCheck]) -> None:
    """A table: one line a setting, with what was seen in float64 and in the kernels' float32."""
    head = ("setting", "layout", "width", "slowest pair", *DEVIATIONS, *DEVIATIONS, "rest", "")
    rows: list[tuple[str, ...]] = [("", "", "", "", "float64", "", "", "float32", "", "", "", ""), head]
    for wide, single in zip(checks[::2], checks[1::2], strict=True):
        deviations = (f"{x:.0e}" for c in (wide, single) for x in (max(c.near, c.far), c.zero, c.norm))
        rest = "none" if wide.width == wide.head_dim else "kept" if wide.rest and single.rest else "CHANGED"
        rows.append(
            (
                one_line(wide.setting),
                wide.layout,
                f"{wide.width} of {wide.head_dim}",
                f"{wide.longest:,.0f}",
                *deviations,
                rest,
                "" if wide.passed and single.passed else "FAILS",
            )
        )
    say(columns(rows, right=range(3, 10)))
    reach, shortest = max(c.reach for c in checks), min(c.shortest for c in checks)
    say(
        f"\nshift: of a score, when both positions move by up to {reach - 4:,}; zero: of the score at distance 0; "
        f"norm: of lengths\n"
        f"all relative to the lengths of the vectors; allowed: {checks[0].bound:.0e} in float64, "
        f"{checks[1].bound:.0e} in float32\n"
        "rest: dimensions that are not rotated; "
        f"slowest pair: tokens for a full turn (the fastest takes {shortest:.2f})"
    )


DEVIATIONS = ("shift", "zero", "norm")
