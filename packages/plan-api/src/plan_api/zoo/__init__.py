"""Plans of known models; each is an ordinary plan, to be read, joined and edited."""

from plan_api.zoo.llama import llama

__all__ = ["llama"]
