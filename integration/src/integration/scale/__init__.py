"""Simulates training on up to 16,384 ranks in one process.

Note [terminology of the simulation]
    world: the ranks, of which the process is rank 0, over torch's fake process group.
    strategy: the kinds of parallelism and their mesh (`strategies`).
    traffic: the collectives of a step along one mesh axis, counted where they reach the process
        group (`traffic`).
    prediction: the time of a step, by a cost model with few constants (`cost`).
"""
