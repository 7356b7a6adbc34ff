"""Checks and helpers of the workspace, run by nox; none of it is installed."""
