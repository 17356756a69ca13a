"""`ropewalk plan`: models and machines from the command line, tables, JSON, and what is refused."""

import json
import runpy
from pathlib import Path

import pytest

from ropewalk.cli import plan as plan_verb
from ropewalk.plan import Machine

FolderMaker = runpy.run_path(str(Path(__file__).parents[1] / "checkpoint" / "conftest.py"))["FolderMaker"]

SEVEN = ("--layers", 32, "--kv-heads", 32, "--head-dim", 128, "--params", "6.75e9")
MACHINE = ("--memory", "80GB", "--bandwidth", "2TB/s", "--flops", "312T")


def test_plain_numbers_and_a_described_machine(ropewalk):
    result = ropewalk("plan", *SEVEN, *MACHINE)
    assert result.exit_code == 0
    assert "524,288 B (512 KiB) a token" in result.stdout
    assert "at 25,749 tokens of one sequence" in result.stdout
    assert "memory 74.5 GiB (80.0 GB), reads 2.00 TB/s, arithmetic 312 Top/s" in result.stdout
    assert "256.000 GiB*" in result.stdout
    assert "largest batch of 4,096 tokens each: 30" in result.stdout
    assert "of the shortest sequences arithmetic binds from a batch of 157" in result.stdout
    assert "at 4,096 tokens memory binds every batch" in result.stdout
    assert "7.82 ms, 128 tok/s" in result.stdout


def test_json_has_numbers_without_units(ropewalk):
    result = ropewalk(
        "plan", *SEVEN, *MACHINE, "--context", "4096", "--batch", "16", "--prompt", "100", "--json"
    )
    facts = json.loads(result.stdout)
    assert facts["cache"]["sizes"] == [{"context": 4096, "batch": 16, "bytes": 32 * 2**30, "fits": True}]
    assert facts["machine"]["operations_per_s"] == 312e12
    assert [row["prompt"] for row in facts["prefill"]] == [100]


def test_a_model_file_on_a_named_machine(ropewalk, smollm2):
    facts = json.loads(ropewalk("plan", smollm2, "--on", "rtx 4090", "--cache-type", "int8", "--json").stdout)
    assert facts["machine"]["name"] == "RTX-4090"
    assert facts["weights"]["total"]["count"] == 134_515_008
    assert facts["cache"]["bytes_per_token"] == 30 * 3 * 2 * (64 + 4)
    assert facts["cache"]["scale_bytes_per_token"] == 30 * 3 * 2 * 4


def test_a_configuration_and_another_weight_type(ropewalk, tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    result = ropewalk("plan", tmp_path, "--weights", "q8_0", "--on", "M4", "--context", "64")
    assert result.exit_code == 0
    assert "(Q8_0)" in result.stdout
    assert "memory as installed, reads 120 GB/s, arithmetic not known" in result.stdout
    assert "not known without --flops" in result.stdout
    assert "largest" not in result.stdout


def test_a_folder_is_counted_by_its_tensors_or_else_by_its_sizes(ropewalk, tmp_path):
    made = FolderMaker()
    folder = made.write(tmp_path / "llama", made.parts("llama"))
    facts = json.loads(ropewalk("plan", folder, "--on", "M4", "--json").stdout)
    in_files = sum(tensor.size for tensor in made.parts("llama").tensors.values())
    assert facts["weights"]["total"] == {"count": in_files, "bytes": 4 * in_files}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "strange"}))
    facts = json.loads(ropewalk("plan", folder, "--on", "M4", "--json").stdout)
    assert facts["weights"]["total"]["count"] == in_files
    assert facts["model"]["notes"] == ["weights counted from the sizes in config.json"]


def test_this_machine_is_measured(ropewalk, monkeypatch):
    monkeypatch.setattr(
        plan_verb, "measure", lambda: Machine("this one", 10**9, 2e10, {"any": 1e12}, "measured")
    )
    result = ropewalk("plan", *SEVEN)
    assert "this one" in result.stdout
    assert "the weights do not fit: 11.6 GiB (12.5 GB) too much" in result.stdout
    assert "this one, changed" in ropewalk("plan", *SEVEN, "--on", "here", "--memory", "64GiB").stdout


def test_the_table_of_machines(ropewalk):
    result = ropewalk("plan", "--machines")
    assert "RTX-5090" in result.stdout and "https://" in result.stdout
    machines = json.loads(ropewalk("plan", "--machines", "--json").stdout)
    assert {"name", "memory_bytes", "bandwidth", "rates", "source"} == set(machines[0])


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--on", "H100-SMX"), 2, "machine 'H100-SMX' is unknown; did you mean H100-SXM"),
        (("--memory", "24"), 2, "--memory is '24'; allowed"),
        (("--bandwidth", "1TB"), 2, "--bandwidth is '1TB'"),
        (("--flops", "312"), 2, "--flops is '312'"),
        (
            ("--context", "-5", *MACHINE),
            2,
            "context is -5; allowed: an integer from 1 to 1,000,000,000,000,000",
        ),
        (("--batch", "0", *MACHINE), 2, "batch is 0"),
        (("--context", "many"), 2, "expected whole numbers"),
        (("--cache-type", "int3", *MACHINE), 2, "cache type is 'int3'; allowed: float16, int8"),
        (("--weights", "Q4_K_M", *MACHINE), 2, "weight type is 'Q4_K_M'; did you mean Q4_K"),
        (("--layers", "-1", *MACHINE), 2, "layers is -1"),
    ],
)
def test_bad_input_is_told(ropewalk, arguments, status, message):
    result = ropewalk("plan", *SEVEN, *arguments)
    assert result.exit_code == status
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_numbers_must_be_complete_and_alone(ropewalk, smollm2):
    assert "needs --layers, --kv-heads" in " ".join(
        ropewalk("plan", "--layers", 3).stderr.replace("│", " ").split()
    )
    assert "excludes" in ropewalk("plan", smollm2, "--layers", 3).stderr
