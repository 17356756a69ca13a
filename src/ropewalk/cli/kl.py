"""`ropewalk kl`: how far a model's distributions are from a reference's, on a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from ropewalk.cli.console import fields, say, verb, write_json
from ropewalk.cli.loading import find, open_llm, progress_on_stderr
from ropewalk.cli.options import Machine, machine, model_argument, takes
from ropewalk.cli.text_file import TEXT_ARGUMENT, StrideOption, WindowOption, WindowsOption, read_text
from ropewalk.text.same import check_same_tokens

if TYPE_CHECKING:
    from ropewalk.evaluation import Rows
    from ropewalk.llm import LLM

FLOAT32 = "float32"


@verb
@takes(machine=machine)
def kl(
    model: Annotated[str, model_argument(required=True)],
    file: Annotated[str, TEXT_ARGUMENT],
    *,
    reference: Annotated[
        str,
        typer.Option(
            "--reference",
            metavar="MODEL|float32",
            help="A model with the same tokens, read with a float16 cache; or float32: the same file computed in "
            "float32 (slow).",
        ),
    ] = FLOAT32,
    window: WindowOption = 512,
    stride: StrideOption = None,
    windows: WindowsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    machine: Machine,
) -> None:
    """Measure how far a model is from a reference.

    It is the KL divergence of its distributions, position by position of a text, in nats.
    """
    from ropewalk import evaluation

    text = read_text(file)
    if reference != FLOAT32:
        find(reference)  # before the other model is loaded
    with open_llm(model, machine) as llm, _rows_of(reference, model, llm, machine) as true_rows:
        cut = evaluation.windows_of(llm, text, window=window, stride=stride, n_windows=windows)
        with progress_on_stderr() as progress:
            found = evaluation.divergence(
                llm.logits_in_parts,
                true_rows,
                cut,
                lambda done: progress("reading windows", done, len(cut)),
            )
    if as_json:
        write_json({**asdict(found), "windows": len(cut), "window": window, "stride": stride})
        return
    ours, theirs = found.perplexity, found.reference_perplexity
    say(
        fields(
            {
                "KL divergence": f"mean {found.mean:.6f} ± {found.standard_error:.6f}, median {found.median:.6f}, "
                f"99 % {found.p99:.6f}, largest {found.maximum:.6f} nats",
                "same top token": f"{100 * found.same_top:.2f} % of {found.n_positions} positions",
                "perplexity": f"{ours.value:.4f}, the reference's {theirs.value:.4f} "
                f"({100 * (ours.value / theirs.value - 1):+.3f} %)",
            }
        )
    )


@contextmanager
def _rows_of(reference: str, model: str, llm: LLM, machine: Machine) -> Iterator[Rows]:
    """The logits of the reference, given token ids."""
    if reference != FLOAT32:
        with open_llm(reference, replace(machine, cache_dtype="float16")) as other:
            check_same_tokens(llm.tokenizer, other.tokenizer, "reference", most_padding=0)
            yield other.logits_in_parts
        return
    from ropewalk.checkpoint.gguf import open_gguf
    from ropewalk.model.reference import Reference

    with open_gguf(find(model)) as checkpoint:
        exact = Reference(llm.config, checkpoint)
        yield lambda token_ids: [exact.logits(token_ids)]
