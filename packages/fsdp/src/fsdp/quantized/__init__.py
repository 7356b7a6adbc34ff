"""Weights that are gathered as one byte per element, with a scale for each tile or block."""

from fsdp.quantized.operands import OperandFormat
from fsdp.quantized.tiles import Quantized, Tiles, dequantize, quantize

__all__ = ["OperandFormat", "Quantized", "Tiles", "dequantize", "quantize"]
