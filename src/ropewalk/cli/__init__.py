"""The command line: `ropewalk VERB ...`, one small file a verb.

Knows the public interfaces of every room, and no private name of any. Nothing heavy is imported until a verb
needs it, so that `ropewalk --help` answers in under 0.3 s.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line and leave the process with its exit status.

    Status 0: done. 1: a `RopewalkError` or what the system refused, told in one line on stderr, or the reader of our
    output went away. 2: wrong usage, values that are not allowed included. 3: `ropewalk batch` has answered
    everything, and some of the answers are errors. 130: Ctrl-C.
    """
    try:
        from ropewalk.cli.console import ending, open_standard_streams

        open_standard_streams()
        with ending():
            from ropewalk.cli.app import build

            build()()
    except KeyboardInterrupt:  # before anything could be told about it
        raise SystemExit(130) from None
