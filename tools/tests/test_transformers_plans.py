"""Which models of transformers have a plan."""

import transformers

from tools.transformers_plans import outcome


def test_models_are_accepted_or_refused_by_style():
    accepted = transformers.Llama4ForCausalLM, transformers.Llama4TextConfig
    refused = transformers.LongcatFlashForCausalLM, transformers.LongcatFlashConfig
    assert outcome(*accepted) == "accepted"
    assert outcome(*refused) == "refused: style 'moe_identity_expert'"


def test_a_config_without_a_decoder_has_no_plan():
    assert outcome(None, transformers.Llama4VisionConfig).startswith("no class")
