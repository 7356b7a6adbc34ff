"""What depends on the routers of transformers' mixtures of experts.

==============  ================================================================
tokens          finds routers, and how ranks share their tokens
auxiliary_loss  their auxiliary loss is that of the tokens of all ranks
z_loss          adds their z-loss to a model's loss
capacity        limits how many tokens of a sequence an expert takes
==============  ================================================================
"""
