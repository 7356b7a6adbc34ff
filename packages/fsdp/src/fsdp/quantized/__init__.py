"""Weights of which a byte an element is gathered, with a scale for each tile."""

from fsdp.quantized.tiles import Quantized, Tiles, dequantize, quantize

__all__ = ["Quantized", "Tiles", "dequantize", "quantize"]
