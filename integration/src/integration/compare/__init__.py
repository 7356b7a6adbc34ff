"""The main job: ``python -m integration.compare --help``.

Note [what is compared]
    job: one system's run, as this command starts it, in ``<out>/runs/<system>``.
    outcome: how a job's process ended; its files may be there or not.
    curve: the losses of a run, step by step; the *reference* is that of ``single``.
    difference: |loss - reference loss| at one step, in nats per token.
    verdict: what a system's curve, or its missing, comes to; a comparison passes when every
        system but the reference is ``bitwise equal`` or ``within tolerance``.
"""
