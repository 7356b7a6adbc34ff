"""What the planner's command line takes."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ragged_shard.planner.architectures import ARCHITECTURES, ExpertLayout
from ragged_shard.planner.presets import PRESETS

PROGRAM = "python -m ragged_shard.planner"

DESCRIPTION = """\
How much padding does a model need when FSDP shards it and blocks of rows must stay whole?

Every transformer layer is one buffer, and embedding, norm and head are one more ("root").
For each number of rows per block and each world size, the planner finds the smallest shard
that cuts no block, and prints what every rank holds, in elements, and how much of all that
is padding. "layers.3 (x58)" is the group that pads most, and 58 groups are planned like it.
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

exit status: 0, or 2 after one sentence that says what is wrong.
"""

RECOMMEND = """\
say which of the world sizes to shard over, for each number of rows. A larger group leaves
each rank less to hold, but blocks divide among more ranks less evenly, so it pads more, and
its collectives have more hops. The size with the least padding is proposed; sizes that pad
at most --tolerance more count as equal, and of equals the largest is taken. More devices
than that: replicate the group (HSDP)"""


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments, checked as far as they can be without a model."""

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


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options in ``arguments``, by default those of the process.

    Exits with status 2 and one sentence on stderr if they cannot be understood, and with 0 after
    ``--help``.
    """
    return Options(**vars(_parser().parse_args(arguments)))


def fail(reason: object) -> NoReturn:
    """Ends the process with status 2 and one line on stderr."""
    text = " ".join(str(reason).split())
    print(f"{PROGRAM}: {text}", file=sys.stderr)
    raise SystemExit(2)


def counts(text: str) -> tuple[int, ...]:
    """Numbers as the command line takes them: ``8``, ``8,96``, ``8:4096`` for doublings, or mixed.

    Returns:
        The numbers in ascending order, each once. A range holds its first number and the doublings
        of it that do not exceed its last.

    Raises:
        ValueError: A number is no integer above 0, or a range ends below its start.
    """
    found: set[int] = set()
    for item in text.split(","):
        first, colon, last = item.partition(":")
        number, stop = _count(first, text), _count(last if colon else first, text)
        if stop < number:
            raise ValueError(f"{item!r} ends below its start; write the smaller number first")
        while number <= stop:
            found.add(number)
            number *= 2
    return tuple(sorted(found))


def _count(digits: str, text: str) -> int:
    stripped = digits.strip()
    if not (stripped.isascii() and stripped.isdigit() and int(stripped) > 0):
        raise ValueError(
            f"{text!r} holds {digits!r}; give integers above 0, such as 8, 8,96 or 8:4096"
        )
    return int(stripped)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # Without the usage, which would drown the one line that matters.
        fail(f"{message}; see --help")


def _counts(text: str) -> tuple[int, ...]:
    try:
        return counts(text)
    except ValueError as error:  # argparse shows the text of this exception only
        raise argparse.ArgumentTypeError(str(error)) from error


def _alignment(text: str) -> int:
    try:
        return _count(text, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer above 0") from error


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no percentage, 0 or more")
    return value / 100


def _parser() -> _Parser:
    parser = _Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model = parser.add_argument_group("the model").add_mutually_exclusive_group(required=True)
    model.add_argument("--preset", metavar="NAME", help="a public model, see below")
    model.add_argument(
        "--from-model",
        metavar="PATH_OR_ID",
        help="a Hugging Face config.json, the folder it is in, or a hub id that is in the cache "
        "or can be downloaded by huggingface_hub; architectures: "
        + ", ".join(sorted(ARCHITECTURES)),
    )
    shape = parser.add_argument_group("what of it")
    shape.add_argument(
        "--experts",
        choices=("separate", "stacked"),
        help="a tensor for every matrix of every expert, as in checkpoints, or all experts in one "
        "tensor per kind of matrix, as in transformers 5; by default as published, "
        "which is stacked for gpt-oss and separate for the others",
    )
    shape.add_argument(
        "--mtp",
        action="store_true",
        help="with the layer of multi-token prediction (deepseek-v3: layer 61, 11.6 billion more)",
    )
    shape.add_argument("--group", metavar="NAME", help="one group only, such as layers.3 or root")
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
        help="the matrices that have such blocks: those of routed experts, all, or those with "
        "a name (layers.3.self_attn.q_proj.weight) in which REGEX is found; by default experts "
        "where the model has any, else all. Every other tensor may be cut anywhere",
    )
    plan.add_argument(
        "--order",
        default="given",
        metavar="given|block|shape|best",
        help="order of a group's tensors in its buffer: the model's, largest block first, by "
        "shape, or the best that a bounded search finds (default given). The table says how "
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
    answer = parser.add_argument_group("the answer")
    answer.add_argument("--recommend", action="store_true", help=RECOMMEND)
    answer.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.001,
        metavar="PERCENT",
        help="padding that --recommend takes for none, in %% of the model (default 0.1)",
    )
    answer.add_argument(
        "--explain",
        action="store_true",
        help="say which tensors and blocks force the padding of the worst group",
    )
    answer.add_argument(
        "--plot",
        type=Path,
        metavar="DIR",
        help="draw two pictures there, each as PNG and SVG: padding against world size, and the "
        "layout of the worst group at the size with most padding of those up to 32 ranks "
        "(needs matplotlib)",
    )
    answer.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return parser
