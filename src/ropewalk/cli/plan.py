"""`ropewalk plan`: what a model takes, what fits, and how fast it can be at best. Nothing is loaded or run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropewalk.cli.bench import numbers
from ropewalk.cli.console import columns, say, tell, verb, write_json
from ropewalk.cli.loading import find
from ropewalk.cli.options import DEFAULT_MODEL, model_argument
from ropewalk.cli.plan_text import show
from ropewalk.errors import UnsupportedModelError

if TYPE_CHECKING:
    from ropewalk.plan import Machine, ModelShape, WeightType

HERE = ("here", "this")


@verb
def plan(
    model: Annotated[str | None, model_argument()] = None,
    *,
    layers: Annotated[int | None, typer.Option("--layers", help="In place of a model: its layers.")] = None,
    heads: Annotated[
        int | None, typer.Option("--heads", help="Heads of queries. Default: as of keys and values.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", help="Heads of keys and values. Default: as of queries.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", help="Width of a head.")] = None,
    params: Annotated[
        str | None, typer.Option("--params", metavar="COUNT", help="Weights: 6.74e9, 7B or 135M.")
    ] = None,
    window: Annotated[int | None, typer.Option("--window", help="Tokens of a sliding window.")] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="TYPE", help="As if all weights were of this type: F16, Q4_K, ..."),
    ] = None,
    cache_type: Annotated[
        str, typer.Option("--cache-type", metavar="TYPE", help="Of the KV cache: float16, int8, float8, ...")
    ] = "float16",
    context: Annotated[
        str | None,
        typer.Option("--context", "-c", metavar="N,N", help="Tokens of a sequence. Default: 4096,32768."),
    ] = None,
    batch: Annotated[
        str | None, typer.Option("--batch", "-b", metavar="N,N", help="Sequences at once. Default: 1,4,16.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="N,N", help="Prompt lengths. Default: 512,4096.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="MACHINE", help="A machine by name; 'here' measures this one."),
    ] = None,
    memory: Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="24GB or 24GiB.")] = None,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", metavar="RATE", help="Of the memory: 1TB/s.")
    ] = None,
    flops: Annotated[
        str | None, typer.Option("--flops", metavar="RATE", help="Operations a second: 312T.")
    ] = None,
    machines: Annotated[bool, typer.Option("--machines", help="List the machines that are known.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Plan for a model: its memory, what fits, its speed at best.

    MODEL may also be a Hugging Face config.json (or its folder), or be left out for plain numbers: --layers,
    --kv-heads, --head-dim and --params. Lists are numbers with commas between them. The machine is this one
    unless --on names another, or --memory and --bandwidth describe one.
    """
    if machines:
        list_machines(as_json)
        return
    shape = _shape(model, _Numbers(layers, heads, kv_heads, head_dim, params, window), weights)
    from ropewalk.plan import make_plan

    result = make_plan(  # refuses what is wrong before anything is measured
        shape,
        cache=cache_type,
        contexts=numbers(context) if context else None,
        batches=numbers(batch) if batch else None,
        prompts=numbers(prompt) if prompt else None,
    )
    result = replace(result, machine=_machine(on, memory, bandwidth, flops))
    if as_json:
        write_json(result.as_dict())
    else:
        show(result)


def _shape(model: str | None, numbers: _Numbers, weights: str | None) -> ModelShape:
    """The model of the arguments."""
    from ropewalk import plan as planning

    kind = planning.weight_type(weights) if weights else None
    if numbers.given:
        if model is not None:
            raise typer.BadParameter(f"--{numbers.given[0]} describes a model: it excludes {model!r}")
        return numbers.shape(kind or planning.weight_type("F16"))
    path = Path(model or DEFAULT_MODEL)
    has_weights = any(path.glob("*.safetensors")) if path.is_dir() else path.suffix != ".json"
    if not has_weights and (path.suffix == ".json" or (path / "config.json").is_file()):
        return planning.shape_of_hf(path, kind)
    from ropewalk.checkpoint.base import open_checkpoint

    try:
        with open_checkpoint(find(model or DEFAULT_MODEL)) as checkpoint:
            shape = planning.shape_of_gguf(checkpoint)
    except UnsupportedModelError:
        if not path.is_dir():
            raise
        return planning.shape_of_hf(path, kind)  # a folder that cannot be run says its sizes all the same
    return shape.with_weight_type(kind) if kind else shape


@dataclass(frozen=True)
class _Numbers:
    """A model by plain numbers; None where an option was not given."""

    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    params: str | None
    window: int | None

    @property
    def given(self) -> list[str]:
        """Names of the options that were given."""
        return [name.replace("_", "-") for name, value in vars(self).items() if value is not None]

    def shape(self, kind: WeightType) -> ModelShape:
        from ropewalk.plan import parse_count, shape_of_numbers

        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        if self.layers is None or kv_heads is None or self.head_dim is None or self.params is None:
            raise typer.BadParameter(
                f"a model by plain numbers needs --layers, --kv-heads, --head-dim and --params; given: "
                f"--{' and --'.join(self.given)}"
            )
        return shape_of_numbers(
            layers=self.layers,
            heads=self.heads,
            kv_heads=kv_heads,
            head_dim=self.head_dim,
            params=parse_count(self.params, "--params"),
            window=self.window or 0,
            weight_type=kind,
        )


def _machine(on: str | None, memory: str | None, bandwidth: str | None, flops: str | None) -> Machine:
    """The machine of the options: named, described or measured."""
    from ropewalk.plan import Machine, find_machine, parse_bandwidth, parse_bytes, parse_rate

    n_bytes = parse_bytes(memory, "--memory") if memory else None
    speed = parse_bandwidth(bandwidth, "--bandwidth") if bandwidth else None
    rate = parse_rate(flops, "--flops") if flops else None
    if on is None and speed is not None:
        return Machine("as described", n_bytes, speed, {"any": rate} if rate else {}, "the command line")
    base = measure() if on is None or on.lower() in HERE else find_machine(on)
    return base.with_limits(memory_bytes=n_bytes, bandwidth=speed, rate=rate)


def measure() -> Machine:
    """This machine, measured here and now with the threads that Ropewalk would use."""
    from ropewalk.backend.host import available_bytes
    from ropewalk.kernels.arithmetic import measure_arithmetic
    from ropewalk.kernels.bandwidth import measure_read_bandwidth
    from ropewalk.kernels.cpu import cpu_identity
    from ropewalk.kernels.team import available_threads
    from ropewalk.plan import Machine

    n_threads = available_threads()
    free = available_bytes()
    tell("measuring read bandwidth and arithmetic ...")
    return Machine(
        name=f"this one ({cpu_identity()[0]}, {n_threads} threads)",
        memory_bytes=free,
        bandwidth=measure_read_bandwidth(n_threads),
        rates={"any": measure_arithmetic(n_threads)},
        source="measured just now: free memory, our fastest read loop, our matrix product in the first-level cache",
    )


def list_machines(as_json: bool) -> None:
    """Print the table of machines."""
    from ropewalk.plan.machine import ARITHMETIC_TYPES
    from ropewalk.plan.machines import MACHINES

    if as_json:
        write_json([vars(replace(machine, rates=dict(machine.rates))) for machine in MACHINES.values()])
        return
    rows: list[Sequence[str]] = [
        ("machine", "memory", "bandwidth", *(f"{t} Top/s" for t in ARITHMETIC_TYPES))
    ]
    for machine in MACHINES.values():
        memory = "" if machine.memory_bytes is None else f"{machine.memory_bytes / 1e9:.0f} GB"
        rates = (f"{machine.rates[t] / 1e12:,.1f}" if t in machine.rates else "" for t in ARITHMETIC_TYPES)
        rows.append((machine.name, memory, f"{machine.bandwidth / 1e9:,.1f} GB/s", *rates))
    say(columns(rows, right=range(1, 7)))
    say("")
    sources: dict[str, list[str]] = {}
    for machine in MACHINES.values():
        sources.setdefault(machine.source, []).append(machine.name)
    for source, names in sources.items():
        say(f"{', '.join(names)}: {source}")
