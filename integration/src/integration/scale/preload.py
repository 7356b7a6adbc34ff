"""What a process that measures has imported before it begins."""

import transformers.models.deepseek_v3.modeling_deepseek_v3
import transformers.models.gpt_oss.modeling_gpt_oss
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

import integration.scale.traffic  # noqa: F401
