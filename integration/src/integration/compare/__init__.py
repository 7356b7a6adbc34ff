"""The main job: ``python -m integration.compare --help``.

Note [what is compared]
    job: a run as this command starts it: a system's in ``<out>/runs/<system>``, one of random
        numbers in ``<out>/runs/random/<case>-<system>-<ranks>-<source>``, an optimizer's in
        ``<out>/runs/optimizers/<optimizer>-<system>``.
    outcome: how a job's process ended; its files may be there or not.
    curve: the losses of a run, step by step; the *reference* is that of ``single``, and of an
        optimizer's runs that of ``ddp``.
    difference: |loss - reference loss| at one step, in nats per token.
    verdict: what a system's curve, or its missing, comes to; a comparison passes when every
        system but the reference is ``bitwise equal`` or ``within tolerance``, and every run with
        dist-rng comes to the ``same numbers``.
    case: where a run draws random numbers on shards: its weights (``init``), or its dropout.
    source: who draws them: ``native`` DTensor, or ``dist-rng``; one device needs neither.
"""
