"""The options of `fsdp.fully_shard` and of its modules' methods, with proofs of their effects.

`choices` has the options with their proofs and the covering runs, `apply` calls `fully_shard` with
them on a small model, and `observation` trains that model and reports what it did.
"""
