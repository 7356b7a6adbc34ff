"""Compares every system with one device: ``python -m integration.compare --help``.

Note [terminology of the comparison]
    job: a run that this command starts. Its folder is ``<out>/runs/<model>-<system>``, or, for
        random numbers, ``<out>/runs/random/<case>-<system>-<ranks>-<source>``, and for optimizers
        ``<out>/runs/optimizers/<optimizer>-<system>``.
    outcome: the exit code of a job's process and its log; files may be missing.
    curve: the losses of a run by step; the *reference* is the curve of ``single``, for optimizers
        that of ``ddp``.
    difference: |loss - reference loss| at one step, in the unit of the model's loss.
    verdict: the result of comparing a curve with its reference. A comparison passes when every
        system but the reference is ``bitwise equal`` or ``within tolerance``, and every run with
        dist-rng has the ``same numbers``.
    case: what a run draws on shards: its weights (``init``) or its dropout masks (``dropout``).
    source: the implementation that draws on shards: ``native`` DTensor, or ``dist-rng``.
"""
