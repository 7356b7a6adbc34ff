"""Measures code that runs: its lines, imports, memory, changes of torch, examples of a README."""
