"""The evaluation harness with our models in it, from its own command line."""

import json
import subprocess
import sys

TASKS = {
    "capitals": """
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_target: label
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "said": """
output_type: generate_until
doc_to_text: "The capital of {{country}} is"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "rolled": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "The capital of {{country}} is{{choices[label]}}."
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
}


def test_scores_texts_and_whole_documents(smollm2, tmp_path):
    cities = {"France": " Paris", "Italy": " Rome", "Germany": " Berlin"}
    rows = [
        {"country": country, "choices": list(cities.values()), "label": i} for i, country in enumerate(cities)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, body in TASKS.items():
        source = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test"
        (tmp_path / f"{name}.yaml").write_text(source + body)
    command = [sys.executable, "-m", "ropewalk", "lm-eval", "--model", "ropewalk", "--batch_size", "4"]
    command += ["--model_args", f"model={smollm2},context_length=256", "--tasks", ",".join(TASKS)]
    command += ["--include_path", tmp_path, "--output_path", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (found,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(found.read_text())["results"]
    assert results["capitals"]["acc,none"] == results["said"]["exact_match,none"] == 1.0
    from ropewalk import LLM

    with LLM(smollm2, context_length=256, kv_tokens=256) as llm:
        texts = [f"The capital of {country} is{city}." for country, city in cities.items()]
        start = min(llm.tokenizer.eos_ids) if llm.tokenizer.bos_id is None else llm.tokenizer.bos_id
        total = sum(llm.score([start], [llm.encode(text, add_special=False)])[0].total for text in texts)
    expected = 2.718281828459045 ** (-total / sum(map(len, texts)))
    assert abs(results["rolled"]["byte_perplexity,none"] - expected) < 1e-9 * expected
