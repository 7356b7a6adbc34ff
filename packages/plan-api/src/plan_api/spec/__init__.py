"""What the user writes: a plan, its entries, the tensors that they name, and when."""
