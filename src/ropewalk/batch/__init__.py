"""Files of requests, answered as fast as the engine can: what `ropewalk batch` does.

`files` reads the requests and keeps the answers, so that a run which was killed can go on; `runner` keeps the engine
busy. What a request may say, and what its answer looks like, is the business of `ropewalk.api`.
"""
