"""Modes and policies of training beside every product of parallelism: what has each of both.

A product and a policy are compared with one device by the comparison, or trained by a test
(`TEST_FILE`), or by the option table, or refused by the trainer's validation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from integration.compare.experiments.parallelism import EXPERIMENT
from integration.errors import UsageError
from integration.option_table.products import Product, compared_runs
from integration.option_table.trainer.choices import BASE, covering_runs, run_options
from integration.systems import get_system
from integration.train.config import DIST_RNG_RANDOM, TrainConfig, degrees_of
from integration.train.validation import validate

__all__ = [
    "EQUAL",
    "POLICIES",
    "RUNS",
    "TESTS",
    "TEST_FILE",
    "UNTESTED",
    "Policy",
    "cells_of",
    "policies_in_tests",
    "refusal",
]  # fmt: skip

EQUAL, TESTS, RUNS, UNTESTED = "equal", "tests", "runs", "untested"
# The test that trains every product with each policy of `policies_in_tests`.
TEST_FILE = "integration/tests/test_policies_of_products.py"


@dataclass(frozen=True, eq=False)
class Policy:
    """A mode or a policy of training.

    Attributes:
        name: its name in the table.
        options: options of the trainer that request it.
        is_in: whether a run with all these options has it.
        alone: options of the run on one device with whose losses those of a run that has it are
            compared.
        tolerance: the largest accepted difference of these losses, if it is more than the model's.
    """

    name: str
    options: Mapping[str, Any]
    is_in: Callable[[Mapping[str, Any]], bool]
    alone: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0

    def of(self, product: Product) -> dict[str, Any]:
        """Returns all options of a run of ``product`` that has it."""
        return {**product.options, **self.options}

    def one_device(self, product: Product) -> dict[str, Any]:
        """Returns the options of one device's run with whose losses that run is compared."""
        options = {**product.one_device, **self.alone}
        if "init" in self.options and product.variant.system != "plan":
            options["init"] = self.options["init"]  # by the initialiser of the model
        return options


def _has(name: str, value: Any) -> Callable[[Mapping[str, Any]], bool]:
    return lambda options: bool(options.get(name) == value)


def _accumulates(options: Mapping[str, Any]) -> bool:
    config = TrainConfig(**options)
    assert config.ranks is not None
    system = get_system(config.system, degrees_of(config))
    degree = system.data_parallel_degree(config.ranks // config.pp_degree)
    return config.global_batch > config.micro_batch * degree


def _with(name: str, option: str, value: Any, **more: Any) -> Policy:
    """Returns a policy that one device can have too."""
    options = {option: value}
    return Policy(name, options, _has(option, value), **({"alone": options} | more))


CHECKPOINTS = Policy("checkpoints", {"checkpoint_every": 1}, lambda options: False)
RECOMPUTATION = _with("recomputation", "activation_checkpointing", "full", alone={})
POLICIES: tuple[Policy, ...] = (
    Policy("Eager", {"static": False}, lambda options: not options.get("static")),
    Policy("static", {"static": True}, lambda options: bool(options.get("static"))),
    Policy("sharded init", {"init": "sharded", "random": DIST_RNG_RANDOM}, _has("init", "sharded")),
    Policy(
        "dropout",
        {"dropout": 0.1, "random": DIST_RNG_RANDOM},
        lambda options: bool(options.get("dropout")) and options["random"] == DIST_RNG_RANDOM,
        alone={"dropout": 0.1},
    ),
    RECOMPUTATION,
    Policy("accumulation", {"global_batch": 16}, _accumulates, alone={"global_batch": 16}),
    CHECKPOINTS,
    Policy(
        "clipping",
        {"clip_grad_norm": 1.0},
        lambda options: options.get("clip_grad_norm") is not None,
        alone={"clip_grad_norm": 1.0},
    ),
    # Products round activations and gathered parameters in other places. Measured: 1.4e-3, 1.3e-4.
    _with("bf16", "dtype", "bf16", tolerance=5e-3),
    _with("fp16", "dtype", "fp16", tolerance=5e-4),
    _with("compile", "compile", "aot_eager", alone={}),
    Policy("offload", {"offload": True, "device": "sim"}, _has("offload", True)),
    # 8 bits and an iteration that orthogonalizes amplify rounding.
    _with("8-bit Adam", "optimizer", "adam8bit", tolerance=5e-5),
    _with("Muon", "optimizer", "muon", tolerance=5e-5),
    # Eigenvectors for eigenvalues of zero are determined by rounding.
    _with("SOAP", "optimizer", "soap", tolerance=1e-3),
)


@functools.cache
def refusal(product: Product, policy: Policy) -> UsageError | None:
    """Returns the error with which the trainer refuses both; None: it accepts them."""
    try:
        validate(TrainConfig(**{**BASE, **policy.of(product)}))
    except UsageError as error:
        return error
    return None


def policies_in_tests(product: Product) -> list[Policy]:
    """Returns the policies with which `TEST_FILE` trains a product.

    They are all that the trainer accepts and the comparison does not have.
    """
    compared = _compared()
    return [
        policy
        for policy in POLICIES
        if not _have(compared, product, policy) and refusal(product, policy) is None
    ]


def cells_of(product: Product) -> Iterator[str | UsageError]:
    """Yields for each policy what has it and the product, or the error that refuses both."""
    compared, tested = _compared(), policies_in_tests(product)
    trained = [run_options(run) for run in covering_runs()]
    for policy in POLICIES:
        error = refusal(product, policy)
        if error is not None:
            yield error
        elif _have(compared, product, policy):
            yield EQUAL
        elif policy in tested:
            yield TESTS
        else:
            yield RUNS if _have(trained, product, policy) else UNTESTED


@functools.cache
def _compared() -> list[Mapping[str, Any]]:
    return [vars(run.job.config) for run in compared_runs(EXPERIMENT.full)]


def _have(runs: Sequence[Mapping[str, Any]], product: Product, policy: Policy) -> bool:
    return any(policy.is_in(run) and product.is_in(run) for run in runs)
