"""Writes weights in Hugging Face's format: safetensors files and config.json."""
