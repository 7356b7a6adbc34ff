"""What code does when it runs: lines, modules, memory, changes of torch, examples of a README."""
