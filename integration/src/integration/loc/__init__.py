"""Counts the lines of code that parallelize a single-device model.

Note [what is counted]
    parallelism: tensor, sequence and data parallelism with sharded parameters (ZeRO-3), as in
        veScale, section 8.2.
    model: changed lines of the model.
    plan: lines that specify placements; those that run, in the functions that are called.
    runtime: lines that the library lacks for this model, such as parallel styles or hooks.
    not counted: imports, function signatures, docstrings, comments, blank lines; the mesh and the
        call, which are the same for all; the trainer's systems, which select degrees; lines of
        ``annotate``, which are for static mode.
"""

from integration.loc.efforts import Effort, LinesOfCode, count_efforts

__all__ = ["Effort", "LinesOfCode", "count_efforts"]
