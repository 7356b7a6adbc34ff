"""The measured pictures, drawn from steps of tiny models."""

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


@pytest.mark.ranks
def test_steps_have_the_collectives_of_their_systems():
    found = steps.measure(TINY, tokens=(1, 8), steps=2)
    kinds = {name: [bar.kind for bar in step.collectives] for name, step in found.items()}
    assert set(kinds["ddp"]) == {steps.REDUCE}
    for name in ("fsdp2", "fsdp"):  # two layers and the root
        assert kinds[name].count(steps.REDUCE) == 3, name
        assert kinds[name].count(steps.ALL_GATHER) in (5, 6), name
    for step in found.values():
        assert {steps.FORWARD, steps.BACKWARD, steps.OPTIMIZER} <= {bar.kind for bar in step.host}
        assert all(0 <= bar.start <= bar.end <= step.milliseconds for bar in step.host)
    assert any(bar.kind == steps.COPY for bar in found["fsdp2"].host)
    assert not any(bar.kind == steps.COPY for bar in found["fsdp"].host)
    assert steps.draw_steps(found).startswith(b"\x89PNG")


@pytest.mark.ranks
def test_static_mode_makes_fewer_calls_than_dtensor_dispatch():
    found = flame.measure(steps=2)
    assert all(step.calls and step.unprofiled > 0 for step in found.values())
    calls = {mode: len(step.calls) for mode, step in found.items()}
    assert calls["native"] > calls["static"]
    assert flame.draw_flames(found).startswith(b"\x89PNG")
