"""Starts the ranks of runs, in fresh processes that have imported everything."""

import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from product_cases import Case
from product_prediction import Cost
from product_rank import RankRun, train

from testkit import free_port

_IMPORTED = (
    "product_rank",
    "plan_api",
    "fsdp",
    "integration.pipeline.stage_plan",
    "integration.pipeline.system",
    "integration.systems.zoo",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
)


def start_server() -> None:
    """Makes processes forks of one that has imported what runs import."""
    os.environ["OMP_NUM_THREADS"] = "1"
    get_context("forkserver").set_forkserver_preload(list(_IMPORTED))


def run(case: Case, model: str, *, steps: int, copies: int = 1) -> list[RankRun]:
    """Trains by a case; returns the measurements of the ranks of all copies.

    Args:
        case: how to train.
        model: name of the model.
        steps: number of steps to measure.
        copies: independent runs at the same time, so that as many processes share the cores as
            those of a product.
    """
    ports = [free_port() for _ in range(copies)]
    with ProcessPoolExecutor(case.ranks * copies, get_context("forkserver")) as pool:
        futures = [
            pool.submit(train, rank, case.ranks, port, case.options_of(model), steps)
            for port in ports
            for rank in range(case.ranks)
        ]
        return [future.result() for future in futures]


def cost_of(ranks: Sequence[RankRun]) -> Cost:
    """Returns the mean over ranks."""
    return Cost(
        statistics.mean(rank.cpu_ms for rank in ranks),
        statistics.mean(sum(rank.calls.values()) for rank in ranks),
        statistics.mean(sum(rank.nbytes.values()) for rank in ranks),
        statistics.mean(rank.share for rank in ranks),
        statistics.mean(rank.calls.get("all_reduce", 0) for rank in ranks),
    )
