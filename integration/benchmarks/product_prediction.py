"""Predicts the processor time, collectives and bytes of a product from runs of its single kinds.

All are of a rank's step, the mean over the ranks of a run; each data parallel rank has the same
samples in every run. ``one`` is one device's run, and *share* is the share of a model's parameters
that a rank of the other kinds has.

- Bytes: FSDP's times the share, as it gathers what the others have left; TP's and EP's as they are.
  A rank of a pipeline has half of the model, and so half of both. The pipeline's own transfers are
  as many as without the others, and half as large with sequence parallelism, which shards them.
- Collectives: the sum of the kinds'. FSDP has a group for each layer and one for the rest of the
  model; each stage of a pipeline has the latter, so that L + 1 groups become (L + 2) / 2 a rank.
  Its all-reduces are the loss's, one for each microbatch on the last stage. TP's collectives are
  one for each microbatch too, so that in a pipeline its own run has the same microbatches.
- Processor time: TP's, and FSDP's beyond one device's: a part for each byte, times the share, and a
  part that does not depend on them. Two runs tell them apart: FSDP, and FSDP that keeps parameters
  gathered between forward and backward, which sends fewer bytes. Where there is no such run, all of
  it counts as bytes'. Half of both in a pipeline, and the pipeline's own beyond half of one
  device's.
- EP is measured beside replicated data parallelism; what it adds is the difference to that run,
  whose bytes, and time beyond one device's, count times the share of parameters that are not
  experts'. So do FSDP's beside EP, as the experts of a rank are sharded no further.
"""

from dataclasses import dataclass

_STAGES = 2


@dataclass(frozen=True)
class Cost:
    """What a rank's step takes, the mean over ranks.

    Attributes:
        cpu_ms: processor time, in milliseconds.
        calls: collectives.
        nbytes: bytes that a rank sends.
        share: share of the model's parameters that a rank has.
        all_reduces: those of the collectives that are all-reduces.
    """

    cpu_ms: float
    calls: float
    nbytes: float
    share: float = 1.0
    all_reduces: float = 0.0


@dataclass(frozen=True)
class Experts:
    """The runs that expert parallelism is predicted from.

    Attributes:
        dp: replicated data parallelism.
        dp_ep: the same ranks with expert parallelism.
    """

    dp: Cost
    dp_ep: Cost


@dataclass(frozen=True)
class Pipeline:
    """The run of a pipeline.

    Attributes:
        pp: two stages.
        one: one device, with the pipeline's microbatches.
        layers: number of the model's layers.
        microbatches: number of its microbatches.
    """

    pp: Cost
    one: Cost
    layers: int
    microbatches: int


def predict(
    one: Cost,
    fsdp: Cost,
    *,
    gathered_once: Cost | None = None,
    tp: Cost | None = None,
    experts: Experts | None = None,
    pipeline: Pipeline | None = None,
) -> Cost:
    """Returns the cost of a product of FSDP and other kinds.

    Args:
        one: one device.
        fsdp: FSDP.
        gathered_once: FSDP that keeps parameters gathered up to the end of the step, as stages of a
            pipeline do; None if there is no such run.
        tp: TP with SP; in a pipeline, with its microbatches.
        experts: EP's, if the product has it.
        pipeline: the pipeline's, if the product has it.
    """
    inner = tp or (pipeline.one if pipeline else one)
    share, cpu_ms, calls, nbytes = inner.share, inner.cpu_ms, inner.calls, inner.nbytes
    if experts is not None:
        dp, both = experts.dp, experts.dp_ep
        share = 2 * both.share - 1  # a rank has half of the experts, and all others
        cpu_ms += both.cpu_ms - one.cpu_ms - share * (dp.cpu_ms - one.cpu_ms)
        calls += both.calls - dp.calls
        nbytes += both.nbytes - share * dp.nbytes
    fixed = 0.0 if gathered_once is None else fixed_ms(one, fsdp, gathered_once)
    if pipeline is not None:
        assert gathered_once is not None
        fsdp = gathered_once
    cpu_ms += fixed + share * (fsdp.cpu_ms - one.cpu_ms - fixed)
    nbytes += share * fsdp.nbytes
    if pipeline is None:
        return Cost(cpu_ms, calls + fsdp.calls, nbytes)
    pp, groups = pipeline.pp, fsdp.calls - fsdp.all_reduces
    calls += groups * (pipeline.layers + _STAGES) / (pipeline.layers + 1)
    calls += fsdp.all_reduces * pipeline.microbatches
    return Cost(
        cpu_ms / _STAGES + pp.cpu_ms - pipeline.one.cpu_ms / _STAGES,
        calls / _STAGES + pp.calls,
        nbytes / _STAGES + pp.nbytes / (_STAGES if tp else 1),
    )


def fixed_ms(one: Cost, fsdp: Cost, gathered_once: Cost) -> float:
    """Returns the part of FSDP's processor time that does not depend on bytes, in milliseconds.

    Args:
        one: one device.
        fsdp: FSDP.
        gathered_once: FSDP that keeps parameters gathered, and so sends fewer bytes.
    """
    per_byte = (fsdp.cpu_ms - gathered_once.cpu_ms) / (fsdp.nbytes - gathered_once.nbytes)
    return fsdp.cpu_ms - one.cpu_ms - per_byte * fsdp.nbytes
