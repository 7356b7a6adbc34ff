"""Trains models under every system and compares the losses with those of one device.

Note [terminology]
    system: an implementation of distributed training (``single``, ``ddp``, ``fsdp2``, ...).
    global batch: the samples of one optimizer step, the same for every system and degree.
    microbatch: the samples of one forward on a rank; a step accumulates several.
    run: a folder with ``metrics.jsonl``, ``summary.json``, checkpoints and TensorBoard files.
"""

__version__ = "0.1.0"
