"""tools.example_results: files of the examples become docs/benchmarks/examples.md."""

import json

from tools.example_results import page


def comparison(case, last, load):
    native = {"losses": [2.5, 1.25], "seconds": 1.04, "mib": 99.6}
    own = {"losses": [2.5, last], "seconds": 0.84, "mib": 80.2}
    return {
        "case": case, "native": native, "fsdp": own, "difference": abs(last - 1.25),
        "tolerance": 1e-5, "load": load,
    }  # fmt: skip


def test_a_row_has_the_losses_time_and_memory_of_both_and_the_page_its_command(tmp_path):
    (tmp_path / "peft.json").write_text(json.dumps([comparison("", 1.25, 1.2)]))
    both = [comparison("adamw", 1.25, 3.4), comparison("muon", 1.5, 2.0)]
    (tmp_path / "torchtitan.json").write_text(json.dumps(both))
    text = page(tmp_path, ["--ranks", "2"])
    peft, adamw, muon = text.splitlines()[-3:]
    numbers = "| 1.0 | 0.8 | 100 | 80 |"
    assert peft == f"| peft | 2.500000, 1.250000 | 2.500000, 1.250000 | 0.0e+00 of 1e-05 {numbers}"
    assert adamw.startswith("| torchtitan, adamw | 2.500000, 1.250000 |")
    assert "| 2.500000, 1.500000 | 2.5e-01 of 1e-05 |" in muon
    assert "`nox -s examples -- --ranks 2` on 20" in text
    assert "with load 1 to 3, torch 2." in text
