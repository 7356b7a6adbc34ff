"""How many lines a user writes to train a model of one device in four kinds of parallelism.

Note [what is counted]
    kinds: tensor, sequence and data parallelism with shared parameters (ZeRO-3), as in veScale,
        section 8.2.
    model: lines of the model that are changed for it.
    plan: lines that say what is placed where; those that run, in the functions that are called.
    runtime: lines that the library lacks for this model, such as styles or hooks.
    not counted: imports, heads of functions, docstrings, comments, blank lines; the mesh and the
        call, which are the same few for all; the trainer's systems, which choose among degrees;
        lines of ``annotate``, which are for static mode.
"""

from integration.loc.efforts import Effort, LinesOfCode, count_efforts

__all__ = ["Effort", "LinesOfCode", "count_efforts"]
