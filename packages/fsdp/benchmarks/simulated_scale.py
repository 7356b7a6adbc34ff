"""LLaMA 3 70B on 8 to 8,192 ranks, and GPT-OSS's padding, from meta: what `--scale` prints."""


def print_scale():
    pass
