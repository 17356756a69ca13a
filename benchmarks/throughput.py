"""Many requests of mixed lengths at once: Ropewalk in one call beside llama.cpp, and each beside itself one by one.

    python benchmarks/throughput.py MODEL --peer-python /path/to/python [--rounds 3] [--json]

64 requests with prompts of 16 to 512 tokens and outputs of 16 to 128, unless told otherwise, greedy, without end
tokens. Each round asks all engines for the same requests, one engine after another, and has requests of its own. A
short first round is not counted: in it llama.cpp works with flash attention off and on, and goes on with what was
quicker. Then it works in two ways, with many sequences in a batch (see `worker_llama_cpp_batch.py`) and one after
another, and the better median of the two is what Ropewalk is compared with. Fails if a token of Ropewalk's differs
between the batch and the request alone. Use a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time

from compare import TEXT, Worker, agreement, cpu_name, share_of_cpu_in_use

from ropewalk import LLM, SamplingParams

PROMPT, OUTPUT = (16, 512), (16, 128)
Request = tuple[list[int], int]


def make_requests(
    words: list[int], rounds: list[int], prompt: tuple[int, int] = PROMPT, output: tuple[int, int] = OUTPUT
) -> list[list[Request]]:
    """Requests for each round. No two prompts begin at the same place of the text: a prefix cache finds none."""
    chosen = random.Random(1)
    starts = chosen.sample(range(len(words) - prompt[1]), sum(rounds))
    requests = [(words[start : start + chosen.randint(*prompt)], chosen.randint(*output)) for start in starts]
    return [[requests.pop() for _ in range(count)] for count in rounds]


def run_together(llm: LLM, requests: list[Request]) -> tuple[float, list[list[int]]]:
    """Seconds of one call, and its tokens."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in requests], params)
    return time.perf_counter() - start, [output.token_ids for output in outputs]


def run_alone(llm: LLM, requests: list[Request]) -> tuple[float, list[list[int]]]:
    """Seconds of a call for each request, and its tokens."""
    seconds, tokens = zip(*(run_together(llm, [request]) for request in requests), strict=True)
    return sum(seconds), [each[0] for each in tokens]


def run_own(llms: dict[str, LLM], requests: list[Request]) -> dict[str, tuple[float, list[list[int]]]]:
    """Seconds and tokens by engine; the tokens must all be the same."""
    found = {name: run_together(llm, requests) for name, llm in llms.items()}
    found["ropewalk, one by one"] = run_alone(next(iter(llms.values())), requests)
    if len({json.dumps(tokens) for _, tokens in found.values()}) > 1:
        raise SystemExit("a token differs between a batch and the request alone")
    return found


def peer_ways(n_slots: int, flash: bool) -> dict[str, dict]:
    """The ways in which llama.cpp works in the rounds that count."""
    return {
        f"llama.cpp, batch of {n_slots}": {"n_slots": n_slots, "flash": flash},
        "llama.cpp, one by one": {"n_slots": 1, "flash": flash},
    }


def run_peer(
    peer: Worker, ways: dict[str, dict], requests: list[Request]
) -> dict[str, tuple[float, list[list[int]]]]:
    """Seconds and tokens of each way."""
    asked = {name: peer.ask(requests=requests, **way) for name, way in ways.items()}
    return {name: (answer["seconds"], answer["tokens"]) for name, answer in asked.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument(
        "--peer-python", help="a Python with llama-cpp-python; without it Ropewalk runs alone"
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=8, help="requests of the round that does not count")
    parser.add_argument(
        "--prompt", type=int, nargs=2, default=PROMPT, help="fewest and most tokens of a prompt"
    )
    parser.add_argument("--output", type=int, nargs=2, default=OUTPUT, help="and of an output")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-batch", type=int, nargs="+", default=[16, 64], help="of Ropewalk")
    parser.add_argument("--slots", type=int, default=16, help="sequences in llama.cpp's batch")
    parser.add_argument("--json", action="store_true", help="one JSON object, with every round")
    options = parser.parse_args()

    from ropewalk.checkpoint.hub import resolve
    from ropewalk.kernels.team import available_threads

    path, n_threads = resolve(options.model), available_threads()
    context = options.prompt[1] + options.output[1]
    llms = {
        f"ropewalk, batch of {n}": LLM(path, context_length=context, kv_tokens=n * context, max_batch=n)
        for n in options.max_batch
    }
    peer = None
    if options.peer_python:
        peer = Worker(options.peer_python, "worker_llama_cpp_batch.py", path, n_threads, context)
    words = next(iter(llms.values())).encode(TEXT.read_text())
    counts = [options.warm_up, *[options.requests] * options.rounds]
    rounds = make_requests(words, counts, options.prompt, options.output)
    ways: dict[str, dict] = {
        f"flash attention {name}": {"n_slots": options.slots, "flash": name == "on"} for name in ("off", "on")
    }
    warm_up: dict[str, float] = {}
    seconds: dict[str, list[float]] = {}
    busy, same = [], []
    for number, requests in enumerate(rounds):
        busy.append(share_of_cpu_in_use())
        ours = run_own(llms, requests)
        theirs = run_peer(peer, ways, requests) if peer else {}
        found = ours | theirs
        print(f"round {number}: " + ", ".join(f"{k} {v[0]:.1f} s" for k, v in found.items()), file=sys.stderr)
        if number == 0:
            warm_up = {name: taken for name, (taken, _) in theirs.items()}
            quicker = min(warm_up, key=warm_up.get, default="")
            ways = peer_ways(options.slots, quicker.endswith("on"))
            continue
        for name, (taken, _) in found.items():
            seconds.setdefault(name, []).append(taken)
        for _, tokens in [*theirs.values()][:1]:
            pairs = zip(next(iter(ours.values()))[1], tokens, strict=True)
            same.append(statistics.mean(agreement(a, b) / len(a) for a, b in pairs))
    counted = rounds[1:]
    result = {
        "model": path.name,
        "cpu": cpu_name(),
        "threads": n_threads,
        "requests": options.requests,
        "rounds": options.rounds,
        "prompt_tokens": statistics.mean(sum(len(p) for p, _ in requests) for requests in counted),
        "output_tokens": statistics.mean(sum(n for _, n in requests) for requests in counted),
        "seconds": seconds,
        "llama_cpp_in_the_warm_up": warm_up,
        "warm_up_requests": options.warm_up,
        "medians": {name: statistics.median(values) for name, values in seconds.items()},
        "others_use_of_cpu": max(busy),
        "same_tokens_as_llama_cpp": statistics.mean(same) if same else None,
        "peer": peer.hello["version"] if peer else None,
    }
    if peer:
        peer.close()
    print(json.dumps(result, indent=2)) if options.json else report(result)


def report(result: dict) -> None:
    medians, seconds = result["medians"], result["seconds"]
    reference = min((n for n in medians if n.startswith("llama.cpp")), key=medians.get, default=None)
    print(
        f"{result['requests']} requests, {result['prompt_tokens']:.0f} tokens of prompts and "
        f"{result['output_tokens']:.0f} of outputs, {result['model']}, {result['threads']} threads, {result['cpu']}\n"
    )
    print("| engine | seconds | output tok/s | all tok/s |" + (" times llama.cpp |" if reference else ""))
    print("|---|---|---|---|" + ("---|" if reference else ""))
    for name, median in sorted(medians.items(), key=lambda item: item[1]):
        both = result["prompt_tokens"] + result["output_tokens"]
        row = f"| {name} | {median:.1f} | {result['output_tokens'] / median:.1f} | {both / median:.0f} |"
        if reference:
            ratios = [b / a for a, b in zip(seconds[name], seconds[reference], strict=True)]
            row += f" {statistics.median(ratios):.2f} |"
        print(row)
    rounds = f"medians of {result['rounds']} rounds" if result["rounds"] > 1 else "one round"
    print(f"\n{rounds}; Ropewalk's tokens are the same in all of its rows")
    if result["peer"]:
        tried = ", ".join(
            f"{name} {taken:.1f} s" for name, taken in result["llama_cpp_in_the_warm_up"].items()
        )
        print(
            f"{result['peer']}, which first took for {result['warm_up_requests']} requests: {tried}\n"
            f"from its first token on, an output of its batch equals ours for {result['same_tokens_as_llama_cpp']:.0%} "
            "of its length on average"
        )
    if result["others_use_of_cpu"] > 0.05:
        print(f"other processes used up to {result['others_use_of_cpu']:.0%} of the CPUs between the rounds")


if __name__ == "__main__":
    main()
