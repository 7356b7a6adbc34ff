"""Of all tests of fused-comm: what ranks begin with."""

from testkit import preload

preload("transformers.models.llama.modeling_llama")
