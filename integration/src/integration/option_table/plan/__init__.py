"""The options of `plan_api.Plan` and of `plan_api.parallelize`, with proofs of their effects.

`choices` has the options with their proofs and the covering runs, `apply` builds a small model and
its plan with the options of a run, and `observation` trains that model and reports what it did.
"""
