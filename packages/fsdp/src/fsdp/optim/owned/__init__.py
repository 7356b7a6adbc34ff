"""What optimizers of whole matrices share; `optimizer` begins it, `matrices` has the words."""
