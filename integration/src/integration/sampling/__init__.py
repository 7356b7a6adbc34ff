"""Samples images from a DiT, and text from a decoder."""

from integration.sampling.command import SampleOptions, main
from integration.sampling.image import Sampling, digits_in_turn, load_dit, sample
from integration.sampling.text import TextModel, TextSampling, generate, load_text_model

__all__ = [
    "SampleOptions",
    "Sampling",
    "TextModel",
    "TextSampling",
    "digits_in_turn",
    "generate",
    "load_dit",
    "load_text_model",
    "main",
    "sample",
]
