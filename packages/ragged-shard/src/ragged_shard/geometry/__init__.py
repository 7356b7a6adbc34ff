"""Arithmetic on shapes: the elements of a tensor that each rank has, and where it stores them."""
