"""Weights that are gathered as one byte per element, with a scale for each tile."""

from fsdp.quantized.tiles import Quantized, Tiles, dequantize, quantize

__all__ = ["Quantized", "Tiles", "dequantize", "quantize"]
