"""Injects faults into a training run, whose losses must equal those of an undisturbed run.

Note [terminology of the soak]
    fault: one rank is killed (SIGKILL), stopped (SIGSTOP) or made to raise (SIGUSR1).
    supervisor: the process beside torchrun that reads the run's progress and sends the signals;
        the training loop is unchanged.
    incident: a fault with its effects: what detected it and when, and from which checkpoint
        training resumed.
"""
