"""Training that is disturbed over and over must come to the losses of an undisturbed run.

Note: a *fault* is what befalls one rank: it is killed (SIGKILL), stopped (SIGSTOP), or made to
raise. A *supervisor* beside torchrun reads the run's progress and sends the signals; the trainer
knows nothing of it. An *incident* is a fault with what came of it: who noticed it and when, and
from where training went on.
"""
