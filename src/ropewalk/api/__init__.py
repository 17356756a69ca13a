"""OpenAI's protocol without HTTP: bodies of requests are checked here, and bodies of answers are made.

`tasks.make_task` turns the path and the body of a request into a `Task`, which says what to generate and what the
answer looks like. `ropewalk serve` and `ropewalk batch` both use it; neither builds a body of its own.
"""
