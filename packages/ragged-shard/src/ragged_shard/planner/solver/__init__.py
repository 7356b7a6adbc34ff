"""Searches for the smallest shard of a group of tensors."""
