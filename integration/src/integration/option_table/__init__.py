"""Every trainer option that changes how a step is executed, and the proof that it is in effect.

`choices` has the options with their proofs, `observation` runs a training and reports what it did,
`covering` chooses few runs in which every accepted pair of options occurs; `fully_shard` and `plan`
are the same of the packages' own options, and
``python -m integration.option_table`` prints the page docs/options.md.
"""
