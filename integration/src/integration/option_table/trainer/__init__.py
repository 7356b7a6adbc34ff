"""The trainer's options, with proofs of their effects.

`choices` has the options with their proofs and the covering runs, and `observation` runs a training
and reports what it did.
"""
