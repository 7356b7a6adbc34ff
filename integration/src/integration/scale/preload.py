"""Imports of a measuring process, before it starts to measure."""

import transformers.models.deepseek_v3.modeling_deepseek_v3
import transformers.models.gpt_oss.modeling_gpt_oss
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

import integration.scale.traffic  # noqa: F401
