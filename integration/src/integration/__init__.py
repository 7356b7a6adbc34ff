"""Real training runs: every system against one device, on the same global batches.

Note [words]
    system: a way to run one model on many devices (``single``, ``ddp``, ``fsdp2``...).
    global batch: the sequences of one optimizer step, the same for every system and degree.
    microbatch: what one rank feeds its model at once; a step accumulates several.
    run: one folder with ``metrics.jsonl``, ``summary.json``, checkpoints and TensorBoard files.
"""

__version__ = "0.1.0"
