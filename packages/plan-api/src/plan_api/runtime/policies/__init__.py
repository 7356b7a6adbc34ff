"""Applies what a plan says about how modules run: fully_shard, recomputation, compilation."""
