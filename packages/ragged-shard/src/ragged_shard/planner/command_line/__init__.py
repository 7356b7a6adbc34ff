"""``python -m ragged_shard.planner``: padding of models over world sizes and block sizes."""
