"""Plans of known models; each is an ordinary plan, to be read, joined and edited."""

from plan_api.zoo.deepseek_v3 import deepseek_v3
from plan_api.zoo.dit import dit
from plan_api.zoo.gemma3 import gemma3
from plan_api.zoo.gpt2 import gpt2
from plan_api.zoo.gpt_oss import gpt_oss
from plan_api.zoo.llama import llama
from plan_api.zoo.mixtral import mixtral
from plan_api.zoo.qwen3 import qwen3
from plan_api.zoo.qwen3_moe import qwen3_moe
from plan_api.zoo.vit import vit

__all__ = [
    "deepseek_v3",
    "dit",
    "gemma3",
    "gpt2",
    "gpt_oss",
    "llama",
    "mixtral",
    "qwen3",
    "qwen3_moe",
    "vit",
]
