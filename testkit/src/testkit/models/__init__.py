"""Small models that know nothing of meshes, and scripts for one device that train them.

The models of `factories` and the scripts of `training` are re-exported here. The other modules are
imported by their names: `residual_stack` (what any `fully_shard` shards), `matrix_net`, `block_net`
and `tile_net` (for matrix optimizers, 8-bit optimizers and quantized weights), `reference_soap`
(SOAP on one device).
"""

from testkit.models.factories import (
    VOCABULARY,
    TwoLinears,
    aria,
    causal_lm,
    deepseek_v2,
    deepseek_v3,
    gemma3,
    gpt2,
    gpt_oss,
    granite_swa,
    llama,
    llama4,
    mixtral,
    nowhere_zero,
    qwen3,
    qwen3_moe,
    reinitialize,
    vit,
)
from testkit.models.training import (
    Trained,
    Training,
    image_loss,
    token_loss,
    train,
    train_with_clipping,
)

__all__ = [
    "VOCABULARY",
    "Trained",
    "Training",
    "TwoLinears",
    "aria",
    "causal_lm",
    "deepseek_v2",
    "deepseek_v3",
    "gemma3",
    "gpt2",
    "gpt_oss",
    "granite_swa",
    "image_loss",
    "llama",
    "llama4",
    "mixtral",
    "nowhere_zero",
    "qwen3",
    "qwen3_moe",
    "reinitialize",
    "token_loss",
    "train",
    "train_with_clipping",
    "vit",
]
