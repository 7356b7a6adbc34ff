"""The plans that transformers models bring along."""
