"""`ropewalk imatrix`: measure on a text which weights matter, for `ropewalk quantize --imatrix`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropewalk.cli.console import byte_size, one_line, say, verb
from ropewalk.cli.loading import find, progress_on_stderr
from ropewalk.errors import PromptError


@verb
def imatrix(
    model: Annotated[str, typer.Argument(help="The model, best with float weights.")],
    text: Annotated[Path, typer.Argument(help="A text file like what the model will read and write.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, .gguf.")],
    window: Annotated[int, typer.Option("--window", min=16, help="Tokens that are read together.")] = 512,
    windows: Annotated[int | None, typer.Option("--windows", min=1, help="At most so many windows.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
) -> None:
    """Measure on a text how much each column of each matrix matters."""
    from ropewalk.checkpoint.base import open_checkpoint
    from ropewalk.imatrix import collect, split_windows, write_imatrix
    from ropewalk.model.config import ModelConfig
    from ropewalk.quantize import check_target
    from ropewalk.text.tokenizer import Tokenizer

    try:
        content = text.read_text("utf-8", errors="replace")
    except OSError as error:
        raise PromptError(f"{text} cannot be read: {error.strerror}") from None
    with open_checkpoint(find(model)) as checkpoint, progress_on_stderr() as progress:
        check_target(checkpoint, output, overwrite)
        config = ModelConfig.from_gguf(checkpoint.metadata, checkpoint.tensors)
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
        start = tokenizer.encode("")
        ids = tokenizer.encode(content, add_special=False)
        parts = split_windows(ids, start, min(window, config.context_length), windows)
        if not parts:
            raise PromptError(f"{text} has {len(ids)} tokens, fewer than one window of {window}")
        sums = collect(checkpoint, config, parts, progress)
    write_imatrix(output, sums, text=text.name, n_windows=len(parts), window=len(parts[0]))
    n_tokens = sum(map(len, parts))
    say(f"{one_line(output)}: {len(sums)} matrices, {n_tokens} tokens, {byte_size(output.stat().st_size)}")
