"""Unmodified models of Hugging Face, of the sizes that are compared."""

import torch

BATCH, LENGTH = 2, 64  # sequences of each rank in a step, tokens in each

LLAMA_SMALL = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2048,
}  # fmt: skip
LLAMA_LARGE = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 16384,
}  # fmt: skip
# All experts of a layer are one parameter of three dims, so none is unused.
MIXTRAL_SMALL = {
    "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2048,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTRAL_LARGE = {
    "hidden_size": 512, "intermediate_size": 1152, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 16384,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
LLAMA_GPU = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
}  # fmt: skip
MODELS = {
    "LLaMA 6 M": LLAMA_SMALL,
    "Mixtral 6 M": MIXTRAL_SMALL,
    "LLaMA 15 M": LLAMA_SMALL
    | {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4},
    "Mixtral 13 M": MIXTRAL_SMALL | {"hidden_size": 384, "intermediate_size": 512},
    "LLaMA 82 M": LLAMA_LARGE,
    "Mixtral 82 M": MIXTRAL_LARGE,
    "LLaMA 220 M": LLAMA_GPU,
}


def build(name):
    """The same weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    if "num_local_experts" in MODELS[name]:
        return MixtralForCausalLM(MixtralConfig(use_cache=False, **MODELS[name]))
    return LlamaForCausalLM(LlamaConfig(use_cache=False, **MODELS[name]))


def batches(name, rank, device, length=LENGTH):
    """Token ids, other ones on each rank."""
    torch.manual_seed(rank)
    vocabulary = MODELS[name]["vocab_size"]
    return [torch.randint(0, vocabulary, (BATCH, length)).to(device) for _ in range(4)]
