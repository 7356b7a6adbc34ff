"""Counts the lines of plan code of the zoo, beside those that the veScale paper reports.

Counted are the lines of the zoo that run when a plan is made for tensor, sequence and data
parallelism, in the functions that it calls as well (`testkit.inspection.code_lines`); not what
refuses options and names placements, which builds nothing. Lines of `annotate` are counted by
themselves: they are for static mode, and do nothing in Eager, of which the paper's counts are.
`python -m integration.report.lines_of_code` puts them beside TorchTitan's.

    python -m tools.plan_lines
"""

from __future__ import annotations

from pathlib import Path

from testkit import fake_mesh
from testkit.inspection.code_lines import Built, built_by

__all__ = ["PAPER", "count"]

ZOO = Path(__file__).parents[1] / "packages/plan-api/src/plan_api/zoo"
#: The paper's own counts, for its plans of models of the same names.
PAPER = {"llama": 29, "mixtral": 38, "dit": 36}
#: Functions that build nothing.
NOT_PLANS = frozenset(
    {"check_ep_chunks", "check_options", "expert_axes", "interleaved_shard", "names_of"}
)


def count(name: str) -> Built:
    """The lines of a plan of the zoo."""
    from plan_api import zoo

    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        make = getattr(zoo, name)
        return built_by(lambda: make(mesh, dp="dp", sp=True), ZOO, without=NOT_PLANS)


def main() -> None:
    """Prints a line per plan of the zoo."""
    print(f"{'plan':10}{'lines':>6}{'paper':>7}{'static':>8}")
    for path in sorted(ZOO.glob("*.py")):
        if path.stem in ("__init__", "experts", "requirements"):
            continue
        built = count(path.stem)
        paper = str(PAPER.get(path.stem, "-"))
        print(f"{path.stem:10}{built.lines:>6}{paper:>7}{built.annotations:>8}")


if __name__ == "__main__":
    main()
