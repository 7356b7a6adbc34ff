"""Pipeline parallelism through torch.distributed.pipelining, of models that know nothing of it."""
