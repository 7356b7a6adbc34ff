"""Shared by Muon and SOAP: optimizers in which one rank, the owner, computes on each matrix.

`split` determines which rows are matrices, `matrices` finds the matrices of a parameter and their
shards, `assignment` chooses owners, `exchange` gathers matrices on their owners and sends results
back, `state` places what owners have, and `optimizer` is the base class. The terminology is defined
in `matrices`.
"""
