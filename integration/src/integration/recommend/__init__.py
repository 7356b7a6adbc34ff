"""Recommends degrees of parallelism, recomputation and offloading for a model and a machine.

Note [terminology of recommendations]
    candidate: the trainer's options of one way to train; its own validation decides which are
        possible (`candidates`).
    inner product: the tensor, context and expert parallel degrees of a candidate, without data
        parallel ranks and pipeline stages. The work of its layers is counted by the simulator that
        `integration.scale` and `fsdp.simulate` use, on fake tensors (`work`).
    prediction: memory of a rank and time of a step, composed of the counted work, data parallelism
        and the pipeline (`memory`, `step_time`), on a machine (`hardware`).
"""
