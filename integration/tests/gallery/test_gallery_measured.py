"""The measured pictures, drawn from steps of tiny models."""

from collections import Counter
from dataclasses import replace

import pytest

from integration.gallery.pictures import flame, steps
from integration.models import LlamaShape

TINY = LlamaShape(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=32,
)


@pytest.mark.slow  # the other picture is measured in the same way
@pytest.mark.ranks
def test_steps_have_the_collectives_of_their_systems():
    found = steps.measure(TINY, tokens=(1, 8), steps=2)
    kinds = {name: [bar.kind for bar in step.collectives] for name, step in found.items()}
    assert set(kinds["ddp"]) == {steps.REDUCE}
    for name in ("fsdp2", "fsdp"):  # two layers, and the root, which is gathered once
        assert kinds[name].count(steps.REDUCE) == 3, name
        assert kinds[name].count(steps.ALL_GATHER) == 5, name
    for step in found.values():
        assert {steps.FORWARD, steps.BACKWARD, steps.OPTIMIZER} <= {bar.kind for bar in step.host}
        for bar in (*step.host, *step.collectives):
            assert 0 <= bar.start <= bar.end <= step.milliseconds
    assert any(bar.kind == steps.COPY for bar in found["fsdp2"].host)
    assert not any(bar.kind == steps.COPY for bar in found["fsdp"].host)
    assert steps.draw_steps(found).startswith(b"\x89PNG")


@pytest.mark.ranks
@pytest.mark.slow  # records three modes
def test_native_dispatch_has_most_calls_of_dtensors_python_and_static_mode_fewest():
    found = flame.measure(steps=1, least_share=0)
    calls = {mode: Counter(call.kind for call in step.calls) for mode, step in found.items()}
    native, rules, static = (calls[mode][flame.DTENSOR] for mode in ("native", "rules", "static"))
    assert native > rules > static
    for of_mode in calls.values():
        assert min(of_mode[kind] for kind in (flame.OPERATOR, flame.COLLECTIVE, flame.PLAN)) > 0
    # matplotlib takes seconds for calls narrower than a pixel.
    wide = {mode: replace(step, calls=step.calls[:500]) for mode, step in found.items()}
    assert flame.draw_flames(wide).startswith(b"\x89PNG")
