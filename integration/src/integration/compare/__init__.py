"""Compares every system with one device: ``python -m integration.compare --help``.

Note [terminology of the comparison]
    experiment: a module of ``experiments``: its options, its runs, and its sections of the report.
    job: a run of the trainer that this command starts, with the folder
        ``<out>/runs/<experiment>/<name>``.
    run: a job of an experiment, with the *reference* that it is compared with and the tolerance.
    outcome: the exit code of a job's process and its log; files may be missing.
    difference: |loss - reference loss| at one step, in the unit of the model's loss.
    verdict: the result of comparing a run with its reference (`Verdict`). A comparison passes when
        every run has finished and every run that is judged is bitwise equal or within its
        tolerance and, where hashes are compared, has the same ones.
"""
