"""The model of a run: built, parallelized, compiled, and initialised."""
