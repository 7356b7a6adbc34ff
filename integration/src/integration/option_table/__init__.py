"""The options that change how a step is executed, with the proofs that they are in effect.

`choices` has the trainer's options with their proofs, `observation` runs a training and reports
what it did, and `covering` selects runs in which every accepted pair of options occurs.
`fully_shard` and `plan` do the same for the packages' options, and
``python -m integration.option_table`` writes the page docs/options.md.
"""
