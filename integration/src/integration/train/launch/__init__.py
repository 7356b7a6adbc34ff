"""Ranks and hosts: torchrun starts them, and these modules say what it leaves unsaid.

`local` starts the ranks of ``--ranks`` with torchrun's agent, `agent` is torchrun's agent of one of
several hosts, `world` creates the process group, `liveness_check` finds lost ranks after a failed
collective, and `watchdog` writes a report when a step hangs. `endpoint` has the addresses by which
hosts reach each other.
"""
