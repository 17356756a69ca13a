"""`ropewalk perplexity`: how well a model predicts a text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ropewalk.cli.console import say, verb, write_json
from ropewalk.cli.loading import open_llm, progress_on_stderr
from ropewalk.cli.options import Machine, machine, model_argument, takes
from ropewalk.cli.text_file import TEXT_ARGUMENT, StrideOption, WindowOption, WindowsOption, read_text


@verb
@takes(machine=machine)
def perplexity(
    model: Annotated[str, model_argument(required=True)],
    file: Annotated[str, TEXT_ARGUMENT],
    *,
    window: WindowOption = 512,
    stride: StrideOption = None,
    windows: WindowsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    machine: Machine,
) -> None:
    """Measure the perplexity of a text.

    It is exp of the mean negative log-probability of the text's tokens.
    """
    from ropewalk import evaluation

    text = read_text(file)
    with open_llm(model, machine) as llm, progress_on_stderr() as progress:
        cut = evaluation.windows_of(llm, text, window=window, stride=stride, n_windows=windows)
        found = evaluation.perplexity(
            llm.logits_in_parts, cut, lambda done: progress("reading windows", done, len(cut))
        )
    if as_json:
        write_json({**asdict(found), "windows": len(cut), "window": window, "stride": stride})
        return
    say(
        f"perplexity {found.value:.4f} ± {found.standard_error:.4f} "
        f"({found.n_tokens} tokens in {len(cut)} windows of {window})"
    )
