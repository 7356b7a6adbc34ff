"""Every option of `plan_api.Plan` and of `plan_api.parallelize`, and the proof of its effect.

`choices` has the options with their proofs and the covering runs, `apply` makes a small model and a
plan of it with the options of a run, and `observation` trains that and reports what it did.
"""
