"""What each kind of operator does to our placements: one table from operators to rules."""
