"""What structured output costs, and whether it keeps its word on a real model.

    python benchmarks/structured.py MODEL.gguf [--max-tokens 200]

Asks for every schema of tests/data/json-schemas.json at temperature 1, sixteen at a time, and checks each finished
answer with the `jsonschema` package. Then decodes 200 tokens one at a time, in turns without a constraint, with one
that allows nearly everything, and with one of nested JSON, and prints the time of a step of each, and how much of it is
spent in the constraint (`mask` and `accept`). Exit status 1 if an answer does not satisfy its schema.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jsonschema

from ropewalk import LLM, SamplingParams
from ropewalk.text.grammar import GrammarConstraint

SCHEMAS = Path(__file__).parents[1] / "tests/data/json-schemas.json"
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
NESTED = {"type": "array", "items": {**ITEM, "additionalProperties": False}, "minItems": 60}


def conformance(llm: LLM, max_tokens: int) -> tuple[int, int, int]:
    """Schemas, answers that ended, and those of them that are not valid."""
    schemas = json.loads(SCHEMAS.read_text())
    streams = []
    finished = wrong = 0
    for start in range(0, len(schemas), 16):
        streams = []
        for name, schema in schemas[start : start + 16]:
            params = SamplingParams(max_tokens=max_tokens, seed=1)
            prompt = [{"role": "user", "content": f"Give an example of: {name}. Answer in JSON."}]
            streams.append(
                (schema, llm.stream_chat(prompt, params, constraint=llm.grammars.json_schema(schema)))
            )
        outputs = [None] * len(streams)
        live = set(range(len(streams)))
        while live:
            for i in sorted(live):
                chunk = next(streams[i][1], None)
                if chunk is None:
                    live.discard(i)
                elif chunk.output is not None:
                    outputs[i] = chunk.output
        for (schema, _), output in zip(streams, outputs, strict=True):
            if output is None or output.finish_reason != "stop":
                continue
            finished += 1
            try:
                jsonschema.Draft202012Validator(schema).validate(json.loads(output.text))
            except (ValueError, jsonschema.ValidationError) as error:
                wrong += 1
                print(f"not valid: {schema}: {output.text!r}: {error}", file=sys.stderr)
    return len(schemas), finished, wrong


class Timed:
    """A constraint with a stopwatch; `spent` is shared by its forks."""

    def __init__(self, constraint: GrammarConstraint, spent: list[float]) -> None:
        self.constraint, self.spent = constraint, spent

    def mask(self):
        start = time.perf_counter()
        mask = self.constraint.mask()
        self.spent.append(time.perf_counter() - start)
        return mask

    def accept(self, token: int) -> None:
        start = time.perf_counter()
        self.constraint.accept(token)
        self.spent[-1] += time.perf_counter() - start

    @property
    def ended(self) -> bool:
        return self.constraint.ended

    def fork(self) -> Timed:
        return Timed(self.constraint.fork(), self.spent)


def cost(llm: LLM) -> dict[str, float]:
    """Seconds of a step at batch 1 by kind of constraint, and those inside the constraint: medians of five rounds."""
    kinds = {
        "none": None,
        "any text": llm.grammars.regex("(.|\n)*"),
        "nested JSON": llm.grammars.json_schema(NESTED),
    }
    steps: dict[str, list[float]] = {name: [] for name in kinds}
    inside: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(6):
        for name, constraint in kinds.items():
            spent: list[float] = []
            params = SamplingParams(temperature=0.8, seed=turn, max_tokens=200, ignore_eos=constraint is None)
            timed = None if constraint is None else Timed(constraint, spent)
            (output,) = llm.generate("A list of things:\n", params, constraint=timed)
            if turn and output.timings.generated_tokens > 50:
                steps[name].append(output.timings.time_per_token_s)
                inside[name].append(statistics.fmean(spent) if spent else 0.0)
    return {
        **{f"step, {name}": statistics.median(values) for name, values in steps.items()},
        **{f"inside, {name}": statistics.median(values) for name, values in inside.items() if name != "none"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file, or a catalog name")
    parser.add_argument("--max-tokens", type=int, default=200)
    options = parser.parse_args()
    with LLM(options.model, context_length=1024) as llm:
        wrong = 0
        if llm.has_chat_template:
            total, finished, wrong = conformance(llm, options.max_tokens)
            print(f"{total} schemas, {finished} answers ended, {wrong} not valid")
        for name, seconds in cost(llm).items():
            print(f"{name:<22} {1e6 * seconds:9.1f} us")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
