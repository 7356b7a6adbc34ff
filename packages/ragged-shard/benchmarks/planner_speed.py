"""How long planning takes, and what it saves against the search that the paper describes.

Goals: under 10 ms for each group of the presets, and for 2,000 random specs at 100,000 ranks; under
300 ms for DeepSeek-V3, group by group, at 1,024 ranks; an import under 50 ms more than a bare
interpreter. `bisection` is the paper's: it doubles and halves the shard, for each multiple that
large tensors ask for; `scanned` is how many sizes an upward scan tests, against the `nodes` of
the search. Figures are the best of some repeats.
"""

import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from resource import RUSAGE_CHILDREN, getrusage
from time import perf_counter

from ragged_shard.planner import TensorSpec, _core, plan_layout
from ragged_shard.planner.models.presets import PRESETS, preset_model
from ragged_shard.planner.models.shapes import resolve_target, specs_of
from ragged_shard.planner.solver.reference import BlockedTensor, any_that_fits, least_shard

ROWS = (1, 16, 128)
WORLD_SIZES = (8, 64, 1024, 4096)
MANY_RANKS = 100_000
GOAL_MS, MODEL_GOAL_MS, IMPORT_GOAL_MS = 10.0, 300.0, 50.0


@dataclass(frozen=True)
class GroupRow:
    """The group of a preset that takes longest."""

    case: str
    world_size: int
    tensors: int
    plan_ms: float
    nodes: int
    scanned: int
    exact: bool
    padding_percent: float
    bisection_percent: float
    of_goal: float


@dataclass(frozen=True)
class GoalRow:
    case: str
    ms: float
    goal_ms: float
    of_goal: float


def best_ms(run: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return min(times) * 1e3


def groups_of(name: str, rows: int) -> list[tuple[TensorSpec, ...]]:
    model = preset_model(name)
    target = resolve_target(model, None)
    return [specs_of(group, rows, target) for group in model.groups]


def searched(specs: Sequence[TensorSpec], world_size: int, nodes: int = 20_000) -> _core.Found:
    numels, blocks = [spec.numel for spec in specs], [spec.block for spec in specs]
    return _core.search(numels, blocks, world_size, 1, nodes)


def blocked_tensors(specs: Sequence[TensorSpec]) -> list[BlockedTensor]:
    return [BlockedTensor(spec.numel, spec.block) for spec in specs]


def bisected(specs: Sequence[TensorSpec], world_size: int) -> int:
    """The shard that the paper's search finds."""
    tensors = blocked_tensors(specs)
    total = sum(tensor.numel for tensor in tensors)
    least = least_shard(tensors, world_size, 1)
    return any_that_fits(tensors, world_size, 1, least, total) or total


def group_row(case: str, specs: Sequence[TensorSpec], world_size: int) -> GroupRow:
    layout = plan_layout(specs, world_size)
    plan_ms = best_ms(lambda: plan_layout(specs, world_size))
    return GroupRow(
        case=case,
        world_size=world_size,
        tensors=len(specs),
        plan_ms=plan_ms,
        nodes=searched(specs, world_size).nodes,
        scanned=layout.shard_size - least_shard(blocked_tensors(specs), world_size, 1) + 1,
        exact=layout.exact,
        padding_percent=100 * layout.padding_ratio,
        bisection_percent=100 * (bisected(specs, world_size) * world_size / layout.total - 1),
        of_goal=plan_ms / GOAL_MS,
    )


def slowest(groups: Iterable[Sequence[TensorSpec]], world_size: int) -> Sequence[TensorSpec]:
    return max(set(groups), key=lambda specs: best_ms(lambda: plan_layout(specs, world_size), 1))


def random_specs(seed: int) -> list[TensorSpec]:
    """2,000 tensors of 1 to 10 million elements: a third each free, in blocks, and whole."""
    draw = random.Random(seed)
    specs = []
    for i in range(2_000):
        numel = draw.randint(1, 10**7)
        block = draw.choice([1, draw.randint(1, min(numel, 4096)), numel])
        specs.append(TensorSpec(f"t{i}", numel, block))
    return specs


def import_ms(statement: str, repeats: int = 15) -> float:
    """Milliseconds of processor time of an interpreter that runs a statement.

    Not the clock's: starting a process waits for whatever else the machine does.
    """
    times = []
    for _ in range(repeats):
        before = getrusage(RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", statement], check=True)
        after = getrusage(RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times) * 1e3


def goal_row(case: str, ms: float, goal_ms: float) -> GoalRow:
    return GoalRow(case, ms, goal_ms, ms / goal_ms)


def rows() -> Iterator[GroupRow | GoalRow]:
    """Every row, as it is measured; about a minute altogether."""
    for name in PRESETS:
        for count in ROWS:
            groups = groups_of(name, count)
            for world_size in WORLD_SIZES:
                specs = slowest(groups, world_size)
                yield group_row(f"{name}, {count} rows", specs, world_size)
    for seed in range(3):
        for world_size in (64, 1000, MANY_RANKS):
            yield group_row(f"2,000 random specs, seed {seed}", random_specs(seed), world_size)
    for count in ROWS:
        whole = groups_of("deepseek-v3", count)
        ms = best_ms(lambda groups=whole: [plan_layout(specs, 1024) for specs in groups])
        yield goal_row(f"all of deepseek-v3, {count} rows, 1024 ranks", ms, MODEL_GOAL_MS)
    more = import_ms("import ragged_shard.planner") - import_ms("pass")
    yield goal_row("import, more than a bare interpreter", more, IMPORT_GOAL_MS)
