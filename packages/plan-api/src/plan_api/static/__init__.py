"""Static Eager: operators run on local tensors, and hooks move them (veScale, section 6.2)."""
