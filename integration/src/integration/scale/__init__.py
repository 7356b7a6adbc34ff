"""What training would take on up to 16,384 ranks: measured on one of them, counted, predicted.

Note: one process plays rank 0 of a *world* of ranks over torch's fake process group. A *way* is how
the ranks share the work (`ways`). *Traffic* is what a way sends in a step along one axis of its
mesh, counted as it reaches the process group (`fake_step`, `traffic`); the time that it takes is
predicted from it by a cost model with a handful of constants (`cost`).
"""
