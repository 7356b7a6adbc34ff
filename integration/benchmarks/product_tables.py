"""Prints the tables of docs/benchmarks/products.md: ``product_tables.py products.json wall.json``.

Reads what ``products.py`` wrote without and with ``--wall``.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_KINDS = {
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_reduce": "AR",
    "all_to_all": "A2A",
    "send": "P2P",
}
_SYSTEMS = {
    "fsdp2": "`fsdp2`",
    "torchtitan-style": "`torchtitan-style`",
    "torch": "torch",
    "Eager": "plan",
    "static": "plan, static",
}
_PRODUCTS = (
    "FSDP2 x TP2 + SP",
    "PP2 x FSDP2",
    "FSDP2",
    "FSDP2 with EP2",
    "PP2 x FSDP2 x TP2 + SP",
)
_TWO_RANKS = ("FSDP2", "TP2 + SP", "PP2", "FSDP2 with EP2")


def _by_run(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    """Returns rows by model, run and system; of a run in copies, that of one copy if there is one.

    Those of one device have no system, and are left out.
    """
    found: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for row in rows:
        model, _, case = row["case"].partition(": ")
        run, comma, system = case.rpartition(", ")
        if (
            comma
            and system in _SYSTEMS
            and ((model, run, system) not in found or row.get("copies") == 1)
        ):
            found[model, run, system] = row
    return found


def _table(header: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(header), "|".join({"l": "---", "r": "---:"}[each] for each in align)]
    return "\n".join(f"| {line} |" for line in [lines[0], *map(" | ".join, rows)]).replace(
        "\n", f"\n|{lines[1]}|\n", 1
    )


def _kinds(row: Mapping[str, Any]) -> str:
    counted = (part.split(" ") for part in row["by_kind"].split(", "))
    return ", ".join(f"{number} {_KINDS[kind]}" for number, kind in counted)


def measured(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of what products take, beside TorchTitan's way."""
    found = _by_run(rows)
    header = ["model", "product", "system", "ranks", "processor time, ms", "collectives", ""]
    header += ["MB sent", "memory, MiB", "first step, s"]
    experts = {model for model, run, _ in found if "EP" in run}
    return _table(
        header,
        "lllrrrlrrr",
        [
            [
                model,
                run.replace("with", "x"),
                _SYSTEMS[system] + (" in a pipeline" if system == "fsdp2" else ""),
                str(row["ranks"]),
                f"{row['cpu_ms']:.0f}",
                f"{row['collectives']:g}",
                _kinds(row),
                f"{row['sent_mb']:.1f}",
                f"{row['memory_mib']:.0f}",
                f"{row['first_step_s']:.1f}",
            ]
            for model in dict.fromkeys(model for model, *_ in found)
            for run in _PRODUCTS
            if run != "FSDP2" or model in experts
            for system in _SYSTEMS
            if (row := found.get((model, run, system))) is not None
        ],
    )


def predicted(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of what single kinds predict, what products take, and the ratio."""
    found = _by_run(rows)
    header = ["model", "product", "system", "processor time, ms", "", "collectives", ""]
    header += ["MB sent", ""]
    return _table(
        header,
        "lllrrrrrr",
        [
            [
                model,
                run.replace("with", "x"),
                _SYSTEMS[system],
                f"{row['predicted_cpu_ms']:.0f} → {row['cpu_ms']:.0f}",
                f"{row['cpu_ratio']:.2f}",
                f"{row['predicted_collectives']:.3g} → {row['collectives']:g}",
                f"{row['collectives_ratio']:.2f}",
                f"{row['predicted_sent_mb']:.2f} → {row['sent_mb']:.2f}",
                f"{row['sent_ratio']:.2f}",
            ]
            for model in dict.fromkeys(model for model, *_ in found)
            for run in _PRODUCTS
            for system in _SYSTEMS
            if "cpu_ratio" in (row := found.get((model, run, system), {}))
        ],
    )


def wall(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of wall times on two ranks: the median round, the fastest and slowest."""
    found = _by_run(rows)
    models = list(dict.fromkeys(model for model, *_ in found))

    def cell(row: Mapping[str, Any] | None) -> str:
        if row is None:
            return ""
        return f"{row['ms']:.0f} ({row['fastest_ms']:.0f} to {row['slowest_ms']:.0f})"

    return _table(
        ["run", "system", *models],
        "ll" + "r" * len(models),
        [
            [run.replace("with", "x"), _SYSTEMS[system], *map(cell, cells)]
            for run in _TWO_RANKS
            for system in _SYSTEMS
            if any(cells := [found.get((model, run, system)) for model in models])
        ],
    )


if __name__ == "__main__":
    products, on_two_ranks = (json.loads(Path(name).read_text()) for name in sys.argv[1:])
    print(measured(products), predicted(products), wall(on_two_ranks), sep="\n\n")
