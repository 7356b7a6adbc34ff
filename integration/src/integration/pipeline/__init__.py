"""Pipeline parallelism of unmodified models, through torch.distributed.pipelining."""
