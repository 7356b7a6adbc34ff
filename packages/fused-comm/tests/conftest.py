"""Of all tests of fused-comm: what ranks begin with."""

from testkit import preload

preload("fused_comm", "transformers.models.llama.modeling_llama")
