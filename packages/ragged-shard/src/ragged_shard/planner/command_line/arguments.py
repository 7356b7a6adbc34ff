"""The arguments of the planner's command line."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ragged_shard.planner.models.presets import PRESETS
from ragged_shard.planner.models.shapes import ExpertLayout

PROGRAM = "python -m ragged_shard.planner"

DESCRIPTION = """\
How much padding does a model need when FSDP shards it and no block of rows may be split?

Every transformer layer is one buffer, and embedding, norm and head are one more ("root").
For each number of rows per block and each world size, the planner finds the smallest shard
that splits no block, and prints what every rank holds, in elements, and how much of it is
padding. "layers.3 (x58)" is the group that pads most, and 58 groups have the same plan.
"""

_LISTED = "\n".join(
    f"  {name:<14} {preset.parameters:>15,}  {preset.source}" for name, preset in PRESETS.items()
)
EPILOG = f"""\
presets:
{_LISTED}

examples:
  {PROGRAM} --preset deepseek-v3 --world-size 8:4096 --rows 128
  {PROGRAM} --preset gpt-oss-120b --rows 1,16,128 --plot pictures
  {PROGRAM} --from-model ./my-model --world-size 96,128,192 --rows 32 --recommend

exit status: 0, or 2 after one sentence that states the error.
"""

RECOMMEND = """\
recommend which of the world sizes to shard over, for each number of rows. In a larger group
each rank holds less, but blocks divide among more ranks less evenly, so it pads more, and
its collectives have more hops. The size with the least padding is recommended; sizes that
pad at most --tolerance more count as equal, and the largest of equals is chosen. With more
devices than that, replicate the group (HSDP)"""


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """The arguments, validated as far as that is possible without a model."""

    preset: str | None
    from_model: str | None
    experts: ExpertLayout | None
    mtp: bool
    group: str | None
    world_sizes: tuple[int, ...]
    rows: tuple[int, ...]
    target: str | None
    order: str
    alignment: int
    recommend: bool
    tolerance: float
    explain: bool
    plot: Path | None
    json: Path | None


def parse(arguments: Sequence[str] | None = None) -> PlannerOptions:
    """Parses ``arguments``, by default those of the process.

    Exits with status 2 and one sentence on stderr if they are invalid, and with 0 after ``--help``.
    """
    return PlannerOptions(**vars(_parser().parse_args(arguments)))


def fail(reason: object) -> NoReturn:
    """Ends the process with status 2 and one line on stderr."""
    text = " ".join(str(reason).split())
    print(f"{PROGRAM}: {text}", file=sys.stderr)
    raise SystemExit(2)


def counts(text: str) -> tuple[int, ...]:
    """Parses numbers: ``8``, ``8,96``, ``8:4096`` for doublings, or a mixture.

    Returns:
        The numbers in ascending order, each once. A range has its first number and the doublings
        of it that do not exceed its last.

    Raises:
        ValueError: A number is not an integer above 0, or a range ends below its start.
    """
    numbers: set[int] = set()
    for item in text.split(","):
        first, colon, last = item.partition(":")
        number, stop = _count(first, text), _count(last if colon else first, text)
        if stop < number:
            raise ValueError(f"expected a range whose smaller number is first, got {item!r}")
        while number <= stop:
            numbers.add(number)
            number *= 2
    return tuple(sorted(numbers))


def _count(digits: str, text: str) -> int:
    stripped = digits.strip()
    if not (stripped.isascii() and stripped.isdigit() and int(stripped) > 0):
        raise ValueError(
            f"expected integers above 0, such as 8, 8,96 or 8:4096, got {digits!r} in {text!r}"
        )
    return int(stripped)


class _PlannerParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # Without the usage, which would hide the one line that matters.
        fail(f"{message}; see --help")


def _counts(text: str) -> tuple[int, ...]:
    try:
        return counts(text)
    except ValueError as error:  # argparse prints the text of this exception only
        raise argparse.ArgumentTypeError(str(error)) from error


def _alignment(text: str) -> int:
    try:
        return _count(text, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected an integer above 0, got {text!r}") from error


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from error
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a percentage of 0 or more, got {text}")
    return value / 100


def _parser() -> _PlannerParser:
    parser = _PlannerParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model(parser)
    _add_shapes(parser)
    _add_plan(parser)
    _add_output(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("the model").add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", metavar="NAME", help="a public model, see below")
    model.add_argument(
        "--from-model",
        metavar="PATH_OR_ID",
        help="a Hugging Face config.json, the folder it is in, or a hub id that is in the cache "
        "or can be downloaded by huggingface_hub, of any causal language model that transformers "
        "can build (needs transformers: pip install ragged-shard[models])",
    )


def _add_shapes(parser: argparse.ArgumentParser) -> None:
    shapes = parser.add_argument_group("its parameters")
    shapes.add_argument(
        "--experts",
        choices=("separate", "stacked"),
        help="a tensor for every matrix of every expert, as in checkpoints, or all experts in one "
        "tensor per kind of matrix, as in transformers 5; by default as published, "
        "which is stacked for gpt-oss and separate for the others",
    )
    shapes.add_argument(
        "--mtp",
        action="store_true",
        help="with the layer of multi-token prediction (deepseek-v3: layer 61, 11.6 billion more)",
    )
    shapes.add_argument("--group", metavar="NAME", help="one group only, such as layers.3 or root")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    plan = parser.add_argument_group("the plan")
    plan.add_argument(
        "--world-size",
        dest="world_sizes",
        type=_counts,
        default=counts("8:1024"),
        metavar="N",
        help="sizes of the FSDP group: a number, a list 8,96,128, or a range 8:4096 of doublings "
        "(default 8:1024)",
    )
    plan.add_argument(
        "--rows",
        type=_counts,
        default=(1, 16, 128),
        metavar="N",
        help="rows of a matrix (of its last dim) per block, as numbers like those above "
        "(default 1,16,128)",
    )
    plan.add_argument(
        "--rows-apply-to",
        dest="target",
        metavar="experts|all|REGEX",
        help="the matrices that have such blocks: those of routed experts, all, or those in whose "
        "name (layers.3.self_attn.q_proj.weight) REGEX is found; by default experts where the "
        "model has any, otherwise all. Every other tensor may be split anywhere",
    )
    plan.add_argument(
        "--order",
        default="given",
        metavar="given|block|shape|best",
        help="order of a group's tensors in its buffer: the model's, largest block first, by "
        "shape, or the best that a bounded search finds (default given). The table shows how "
        "close to the smallest for that order the shard is proved to be",
    )
    plan.add_argument(
        "--alignment",
        type=_alignment,
        default=1,
        metavar="N",
        help="make every shard a multiple of N elements, such as 8 for 16 bytes of bf16 "
        "(default 1)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("the output")
    output.add_argument("--recommend", action="store_true", help=RECOMMEND)
    output.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.001,
        metavar="PERCENT",
        help="padding that --recommend counts as none, in %% of the model (default 0.1)",
    )
    output.add_argument(
        "--explain",
        action="store_true",
        help="explain which tensors and blocks force the padding of the worst group",
    )
    output.add_argument(
        "--plot",
        type=Path,
        metavar="DIR",
        help="draw two pictures there, each as PNG and SVG: padding against world size, and the "
        "layout of the worst group at the size with most padding of those up to 32 ranks "
        "(needs matplotlib)",
    )
    output.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
