"""Shared by Muon and SOAP: optimizers in which one rank, the owner, computes on each matrix.

`matrices` finds the matrices of a parameter and their shards, `assignment` chooses owners,
`exchange` gathers matrices on their owners and sends results back, and `optimizer` is the base
class. The terminology is defined in `matrices`.
"""
