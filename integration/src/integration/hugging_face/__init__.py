"""Reads and writes weights in Hugging Face's format: safetensors files and config.json."""

from integration.hugging_face.reader import WeightsFolder, load_weights, open_folder, require_fits
from integration.hugging_face.writer import write_weights

__all__ = ["WeightsFolder", "load_weights", "open_folder", "require_fits", "write_weights"]
