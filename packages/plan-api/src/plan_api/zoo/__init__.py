"""Plans of known models; each is an ordinary plan, to be read, joined and edited."""

from plan_api.zoo.dit import dit
from plan_api.zoo.gpt2 import gpt2
from plan_api.zoo.llama import llama
from plan_api.zoo.mixtral import mixtral
from plan_api.zoo.vit import vit

__all__ = ["dit", "gpt2", "llama", "mixtral", "vit"]
