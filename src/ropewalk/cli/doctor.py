"""`ropewalk doctor`: what this machine can do, what Ropewalk makes of it, and why."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer

from ropewalk import __version__
from ropewalk.cli.console import byte_size, fields, one_line, say, tell, verb, write_json

LIBRARIES = ("numba", "llvmlite", "numpy", "tokenizers", "jinja2", "huggingface_hub")


@verb
def doctor(
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", min=1, help="Measure with so many threads.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show what this machine can do, and what is chosen for it.

    CPU, kernels, threads, folders, versions, and the read bandwidth, which is measured.
    """
    facts = examine(threads)
    if as_json:
        write_json(facts)
    else:
        show(facts)


def examine(threads: int | None) -> dict[str, Any]:
    """What `doctor` shows, as JSON values. The read bandwidth is measured here and now."""
    from ropewalk.checkpoint.hub import cache_dir
    from ropewalk.kernels.bandwidth import measure_read_bandwidth
    from ropewalk.kernels.cache import cache_bytes, cache_folder
    from ropewalk.kernels.cpu import RUNGS, choose_rung, cpu_features, cpu_identity, refusal
    from ropewalk.kernels.team import available_threads, thread_limits

    features = cpu_features()
    rung = choose_rung()
    used, everything = cache_bytes()
    n_threads = threads or available_threads()
    tell("measuring the read bandwidth ...")
    return {
        "versions": {
            "ropewalk": __version__,
            "python": platform.python_version(),
            **{library: version(library) for library in LIBRARIES},
        },
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "executable": sys.executable,
        "cpu": {"name": cpu_identity()[0], "features": sorted(features)},
        "kernels": {
            "chosen": rung.name,
            "reason": rung.reason,
            "usable": [name for name in RUNGS if refusal(name) is None],
            "not_usable": {name: why for name in RUNGS if (why := refusal(name))},
        },
        "threads": {
            "measured_with": n_threads,
            "default": available_threads(),
            "limits": thread_limits(),
            "cpus_of_the_machine": os.cpu_count(),
        },
        "folders": {
            "cache": str(cache_dir()),
            "kernels": str(cache_folder()),
            "kernels_bytes": used,
            "all_kernels_bytes": everything,
        },
        "read_bandwidth_bytes_per_s": measure_read_bandwidth(n_threads),
    }


def show(facts: dict[str, Any]) -> None:
    """`facts` of `examine` for people."""
    cpu, kernels, threads, folders = facts["cpu"], facts["kernels"], facts["threads"], facts["folders"]
    bandwidth = facts["read_bandwidth_bytes_per_s"]
    limits = ", ".join(f"{name} {number}" for name, number in threads["limits"].items())
    all_cpus = threads["cpus_of_the_machine"]
    versions = [f"{name} {number}" for name, number in facts["versions"].items()]
    sizes = f"{byte_size(folders['kernels_bytes'])}; in all {byte_size(folders['all_kernels_bytes'])}"
    lines = {
        "versions": ", ".join(versions),
        "python": facts["executable"],
        "system": facts["system"],
        "cpu": f"{cpu['name']}: {' '.join(f for f in cpu['features'] if _matters(f))}",
        "kernels": f"{kernels['chosen']}: {kernels['reason']} (usable: {', '.join(kernels['usable'])})",
        "threads": f"{threads['default']}, the least of {limits} ({all_cpus} CPUs in all)",
        "cache": folders["cache"],
        "compiled kernels": f"{folders['kernels']} ({sizes})",
        "read bandwidth": f"{bandwidth / 1e9:.1f} GB/s with {threads['measured_with']} threads",
    }
    say(fields({name: one_line(value) for name, value in lines.items()}))


def _matters(feature: str) -> bool:
    """Whether the kernels could make something of a CPU feature."""
    return feature.startswith(("avx", "amx", "f16c", "fma", "neon", "dotprod", "i8mm", "sve"))
