"""Reduces the gradients of whole models in buckets, during backward.

===========  ======================================================================
reducer      `GradReducer`: hooks, the order of launches, accumulation
plan         which parameters, groups and reductions: agreed on by all ranks
gradient     the state of one parameter's gradient between steps
buffers      the memory of buckets, by torch or by a `FlatBuffer` allocator
report       what the last step sent, and how long the host waited
===========  ======================================================================
"""

from fused_comm.grad_reducer.buffers import FlatBuffer
from fused_comm.grad_reducer.reducer import GradReducer
from fused_comm.grad_reducer.report import BucketReport, Report

__all__ = ["BucketReport", "FlatBuffer", "GradReducer", "Report"]
