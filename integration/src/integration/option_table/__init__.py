"""The options that change how a step is executed, with the proofs that they are in effect.

`trainer`, `fully_shard` and `plan` have a table of options each: `choices` has the options with
their proofs, and `observation` trains with the options of a run and reports what each rank did.
`pairwise` selects the runs, in which every accepted pair of options occurs, and
``python -m integration.option_table`` writes the page docs/support/options.md.
`composition` writes docs/support/composition.md: `products` of parallelism, the `policies` with
which they are trained, and the differences in `comparison_record`.
"""
