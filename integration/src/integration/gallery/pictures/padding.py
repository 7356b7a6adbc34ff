"""Padding of real models' parameter groups, with the planner and without it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from integration.gallery.picture import Picture, as_png, gallery_figure
from integration.report.figures import style_axes
from integration.report.palette import LIGHT
from ragged_shard.planner import TensorSpec, plan_layout
from ragged_shard.planner.models.presets import preset_model
from ragged_shard.planner.models.shapes import resolve_target, specs_of

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
#: The models, and the rows of a matrix that no rank boundary splits.
MODELS = {"llama3-8b": 16, "deepseek-v3": 128}
_TITLES = {"llama3-8b": "LLaMA 3 8B, 16 rows", "deepseek-v3": "DeepSeek-V3, 128 rows"}


@dataclass(frozen=True)
class PaddingShares:
    """The padding of one model over the elements of its parameters.

    Attributes:
        planned: with the planner's buffer for each group.
        by_tensor: with each tensor divided by itself into equal shards of complete blocks.
    """

    planned: float
    by_tensor: float


def padding(model: str, ranks: int, rows: int) -> PaddingShares:
    """Plans every group of a preset, where no rank boundary splits ``rows`` rows of a matrix.

    Blocks are those of experts' matrices, or of all matrices in a model without experts.
    """
    shapes = preset_model(model)
    target = resolve_target(shapes, None)
    counts: dict[tuple[TensorSpec, ...], int] = {}
    for group in shapes.groups:  # most layers are alike
        specs = specs_of(group, rows, target)
        counts[specs] = counts.get(specs, 0) + 1
    planned = sum(
        plan_layout(specs, ranks, order="best").padding * n for specs, n in counts.items()
    )
    by_tensor = sum(padding_by_tensor(specs, ranks) * n for specs, n in counts.items())
    return PaddingShares(planned / shapes.numel, by_tensor / shapes.numel)


def padding_by_tensor(specs: Sequence[TensorSpec], ranks: int) -> int:
    """Returns the padding of a group if every rank has equally many complete blocks of each tensor.

    That is how FSDP2 divides dim 0, with blocks of one row: a shard has ``ceil(blocks / ranks)``.
    """
    total = 0
    for spec in specs:
        blocks = -(-spec.numel // spec.block)
        total += -(-blocks // ranks) * ranks * spec.block - spec.numel
    return total


def paddings(ranks: Sequence[int] = RANKS) -> dict[str, Mapping[int, PaddingShares]]:
    """Returns the padding of each model by the number of ranks."""
    return {model: {n: padding(model, n, rows) for n in ranks} for model, rows in MODELS.items()}


def draw() -> bytes:
    """Draws a panel per model: padding against the number of ranks, on a logarithmic scale."""
    found = paddings()
    figure = gallery_figure(3.9)
    for axes, (model, by_ranks) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        style_axes(axes, LIGHT, _TITLES[model], grid_axis="y")
        lines = {
            "each tensor by itself": [each.by_tensor for each in by_ranks.values()],
            "planned": [each.planned for each in by_ranks.values()],
        }
        for (label, shares), marker, colour in zip(
            lines.items(), "so", (LIGHT.series[1], LIGHT.series[0]), strict=True
        ):
            percents = [100 * share for share in shares]
            axes.plot(
                range(len(by_ranks)),
                percents,
                color=colour,
                marker=marker,
                label=label,
                clip_on=False,
            )
            axes.annotate(
                f"{percents[-1]:,.3g} %" if percents[-1] < 1000 else f"{percents[-1]:,.0f} %",
                (len(by_ranks) - 1, percents[-1]), (2, 8 if marker == "s" else -16),
                textcoords="offset points", ha="right", fontsize=9, color=colour,
            )  # fmt: skip
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set_ylim(0, 10_000)
        axes.set_yticks((0, 0.01, 0.1, 1, 10, 100, 1_000, 10_000))
        axes.set_yticklabels(("0", "0.01", "0.1", "1", "10", "100", "1,000", "10,000"))
        axes.set_xticks(range(len(by_ranks)), [str(ranks) for ranks in by_ranks])
        axes.set_xlabel("ranks")
        axes.set_ylabel("padding, % of the parameters" if model == "llama3-8b" else "")
        handles = axes.get_lines()
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return as_png(figure)


PICTURE = Picture("padding.png", draw)
