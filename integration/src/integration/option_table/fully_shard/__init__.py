"""Every option of `fsdp.fully_shard` and of its modules' methods, and the proof of its effect.

`choices` has the options with their proofs and the covering runs, `apply` calls `fully_shard` with
them on a small model, and `observation` trains that and reports what it did.
"""
