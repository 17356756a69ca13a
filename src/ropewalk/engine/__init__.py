"""Sequences of tokens through one model: requests, pages, the schedule, the sampler, the step."""
