"""The command line with a model that counts for ever, for tests that need a process of their own."""

import itertools
import os
import time
from types import SimpleNamespace

from ropewalk.cli import chat, main, run


class CountingLLM:
    context_length = 100
    has_chat_template = True

    def stream_chat(self, messages, params):
        for number in range(int(os.environ["LAST"])) if "LAST" in os.environ else itertools.count():
            time.sleep(0.01)
            yield SimpleNamespace(text=f"{number}\x1b[31m ", output=None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


run.open_llm = chat.open_llm = lambda model, machine: CountingLLM()
main()
