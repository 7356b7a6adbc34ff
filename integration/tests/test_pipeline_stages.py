"""How a model is cut: split points, parts, and which schedules take how many of them."""

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleGPipe

from integration.errors import UsageError
from integration.models.dit import DiffusionLoss, DiT
from integration.pipeline.families import family_of
from integration.pipeline.schedules import SCHEDULES
from integration.pipeline.split import (
    Chain,
    adopt_tensors,
    even_split,
    model_part,
    stage_units,
    tied_parameters,
)
from integration.pipeline.stage import Stage, stage_output
from integration.pipeline.tied import name_as_first
from testkit import fake_mesh, models, run_ranks


def chain(layers):
    names = tuple(f"layers.{index}" for index in range(layers))
    return Chain(("embed",), names, ("norm", "head"))


@pytest.mark.parametrize(
    ("layers", "stages", "ends", "starts"),
    [
        (8, 2, 1, [4]),
        (8, 4, 1, [2, 4, 7]),
        (8, 4, 0, [2, 4, 6]),
        (4, 4, 1, [1, 2, 3]),
        (2, 2, 1, [1]),
        (6, 2, 3, [3]),
        (5, 1, 1, []),
    ],
)  # fmt: skip
def test_stages_are_even_and_none_is_without_a_layer(layers, stages, ends, starts):
    points = even_split(chain(layers), stages, ends=ends)
    assert points == tuple(f"layers.{start}" for start in starts)
    cut = stage_units(chain(layers), points)
    assert sum(cut, ()) == chain(layers).units
    assert all(any(unit.startswith("layers.") for unit in stage) for stage in cut)


@pytest.mark.parametrize("stages", [3, 4])
def test_inputs_have_a_stage_of_their_own_where_layers_are_too_few_and_outputs_after_them(stages):
    cut = stage_units(chain(2), even_split(chain(2), stages))
    assert sum(cut, ()) == chain(2).units
    assert cut[0] == chain(2).inputs
    assert [unit for stage in cut for unit in stage[:1]][1:3] == ["layers.0", "layers.1"]
    assert (cut[-1] == chain(2).outputs) is (stages == 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: models.llama(num_hidden_layers=4),
        lambda: models.mixtral(num_hidden_layers=4),
        lambda: DiffusionLoss(DiT(depth=4)),
    ],
    ids=["llama", "mixtral", "dit"],
)
def test_the_parts_of_a_model_share_its_parameters_and_each_is_in_one(make):
    model = make()
    before = dict(model.named_parameters())
    cut = family_of(model).chain(model)
    stages = stage_units(cut, even_split(cut, 3))
    found = {}
    for stage in stages:
        part = model_part(model, stage, cut)
        assert type(part) is type(model)
        for name, parameter in part.named_parameters():
            assert name not in found
            found[name] = parameter
    assert found.keys() == before.keys()
    assert all(found[name] is before[name] for name in before)


@pytest.mark.parametrize(
    "make", [lambda: models.llama(num_hidden_layers=4), lambda: DiffusionLoss(DiT(depth=4))]
)
def test_a_part_has_no_modules_of_other_stages_and_the_model_keeps_all(make):
    model = make()
    names = [name for name, _ in model.named_modules()]
    cut = family_of(model).chain(model)
    middle = model_part(model, cut.layers[1:3], cut)
    units = {unit for unit in (*cut.units, *cut.loss) if unit in dict(middle.named_modules())}
    assert units == set(cut.layers[1:3])
    assert [name for name, _ in model.named_modules()] == names


def test_hooks_and_tensors_of_a_part_are_not_on_the_model_or_another_part():
    model = models.llama()
    cut = family_of(model).chain(model)
    first, second = (model_part(model, units, cut) for units in (cut.units[:2], cut.units[2:]))
    first.model.register_forward_hook(lambda *_: None)
    first.model.rotary_emb.register_forward_hook(lambda *_: None)
    first.model.rotary_emb.inv_freq = torch.zeros(8)
    for other in (model, second):
        assert not other.model._forward_hooks
        assert not other.model.rotary_emb._forward_hooks
        assert other.model.rotary_emb.inv_freq.any()


def test_a_model_adopts_what_its_parts_have_replaced():
    model = DiffusionLoss(DiT(depth=2))
    cut = family_of(model).chain(model)
    of_rank = model_part(model, cut.units, cut)
    part = model_part(model, cut.units[:4], cut)
    replaced = torch.nn.Parameter(torch.zeros(1, 16, 32))
    part.model.pos_embed = replaced
    adopt_tensors(of_rank, [part])
    assert of_rank.model.pos_embed is replaced
    assert model.model.pos_embed is not replaced


def in_turn(model, points, batch):
    """The loss of the stages of a model, called one after another."""
    family = family_of(model)
    cut = family.chain(model)
    passed = family.inputs(batch)
    for index, stage in enumerate(stage_units(cut, points)):
        part = model_part(model, stage, cut)
        family.set_forward(part, first=index == 0)
        output = part(*passed, **family.keywords(batch))
        passed = output if isinstance(output, tuple) else (output,)
    return stage_output(output, last=True)


@pytest.mark.parametrize("points", [("model.layers.0", "model.layers.2", "lm_head"), ()])
def test_stages_called_in_turn_have_the_models_loss(points):
    model = models.llama(num_hidden_layers=3)
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids}
    torch.testing.assert_close(in_turn(model, points, batch), model(**batch).loss, rtol=0, atol=0)


@pytest.mark.parametrize("make", [models.gemma3, models.gpt_oss])
def test_layers_of_a_stage_have_their_own_kind_of_attention(make):
    """The forward counts the layers of a stage from 0; the second one has no sliding window."""
    model = make()
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids}
    points = ("model.layers.1",)
    torch.testing.assert_close(in_turn(model, points, batch), model(**batch).loss, rtol=0, atol=0)
    assert model.config.layer_types == ["sliding_attention", "full_attention"]


def test_stages_of_a_diffusion_model_called_in_turn_have_its_loss():
    model = DiffusionLoss(DiT(depth=3, class_dropout_prob=0.0))
    images = torch.randn(2, 4, 8, 8)
    batch = {"x": images, "t": torch.tensor([3, 900]), "y": torch.tensor([1, 2])}
    batch["noise"] = torch.randn_like(images)
    points = ("model.blocks.1", "model.final_layer")
    torch.testing.assert_close(in_turn(model, points, batch), model(**batch), rtol=0, atol=0)


SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64,
    "num_hidden_layers": 3, "use_cache": False, "attn_implementation": "eager",
}  # fmt: skip


def phi():
    """Phi, with a dropout behind the embedding and a norm of another name than LLaMA's."""
    torch.manual_seed(0)
    return transformers.PhiForCausalLM(transformers.PhiConfig(**SMALL)).train()


def gpt_neox():
    """GPT-NeoX, whose base model is no `model`."""
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(**SMALL | {"hidden_dropout": 0.0})
    return transformers.GPTNeoXForCausalLM(config).train()


@pytest.mark.parametrize(
    ("make", "first", "last"),
    [
        (phi, ("model.embed_tokens", "model.embed_dropout"), ("model.final_layernorm", "lm_head")),
        (
            gpt_neox,
            ("gpt_neox.embed_in", "gpt_neox.emb_dropout"),
            ("gpt_neox.final_layer_norm", "lm_head"),
        ),
    ],
)
def test_stages_of_other_decoders_are_those_of_their_pp_plan(make, first, last):
    model = make()
    cut = family_of(model).chain(model)
    assert (cut.inputs, cut.outputs) == (first, last)
    assert len(cut.layers) == 3
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids}
    points = (cut.layers[1], last[0])
    torch.testing.assert_close(in_turn(model, points, batch), model(**batch).loss, rtol=0, atol=0)


def test_a_decoder_with_parameters_outside_of_its_units_is_refused():
    model = models.llama()
    model.model.scale = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"got model\.scale\.weight of Llama.*, which no stage"):
        family_of(model).chain(model)


@pytest.mark.ranks
def test_a_pipeline_of_a_pp_plan_trains_as_one_device():
    """Losses, and the gradients of each rank's parameters, of several steps."""
    steps, ids = 3, torch.arange(96).view(4, 24) % 64

    def train(model, loss_of_step):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained = []
        for _ in range(steps):
            loss = loss_of_step()
            grads = {name: one.grad.clone() for name, one in model.named_parameters()}
            trained.append((loss, grads))
            optimizer.step()
            optimizer.zero_grad()
        return trained

    def of_rank():
        group = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)).get_group()
        rank, model = group.rank(), phi()
        family = family_of(model)
        cut = family.chain(model)
        part = model_part(model, stage_units(cut, even_split(cut, 2))[rank], cut)
        family.set_forward(part, first=rank == 0)
        tokens = torch.empty(2, 24, dtype=torch.int64, device="meta")
        passed = torch.empty(2, 24, 32, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        taken, returned = (tokens, passed) if rank == 0 else (passed, loss)
        stage = Stage(
            part, rank, 2, torch.device("cpu"), (taken,), (returned,), group=group,
        )  # fmt: skip
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda loss, _: loss)

        def step():
            losses = []
            inputs, target = ((ids,), None) if rank == 0 else ((), ids)
            schedule.step(*inputs, target=target, losses=losses, return_outputs=False, labels=ids)
            return torch.stack(losses).mean().item() if losses else None

        return train(part, step)

    whole = phi()

    def step():
        loss = whole(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item()

    expected = train(whole, step)
    found = run_ranks(of_rank, 2, timeout=120)
    for number, (loss, grads) in enumerate(expected):
        of_ranks = [rank[number] for rank in found]
        assert [one for one, _ in of_ranks] == [None, pytest.approx(loss, abs=1e-6, rel=0)]
        parts = [grads_of_rank for _, grads_of_rank in of_ranks]
        assert all(parts)
        torch.testing.assert_close(parts[0] | parts[1], grads, atol=1e-6, rtol=1e-4)


def test_tied_parameters_are_found_by_the_units_that_share_them():
    model = models.llama(tie_word_embeddings=True)
    cut = family_of(model).chain(model)
    (tied,) = tied_parameters(model, cut)
    assert (tied.name, tied.unit) == ("model.embed_tokens.weight", "model.embed_tokens")
    assert (tied.other_name, tied.other_unit) == ("lm_head.weight", "lm_head")
    assert not tied_parameters(models.llama(), cut)
    model.model.norm.weight = model.model.embed_tokens.weight
    with pytest.raises(UsageError, match=r"at most two modules, got lm_head.weight, which is tied"):
        tied_parameters(model, cut)


def test_a_further_name_is_the_first_of_a_parameter():
    model = models.llama()
    cut = family_of(model).chain(model)
    part = model_part(model, cut.units[2:], cut)
    name_as_first(part, "model.embed_tokens.weight", part.lm_head.weight)
    names = {name: id(one) for name, one in part.named_parameters()}
    assert names["model.embed_tokens.weight"] == id(part.lm_head.weight)
    assert "lm_head.weight" not in names  # named once
    assert part.get_parameter("model.embed_tokens.weight") is part.lm_head.weight
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= part.state_dict().keys()


def test_a_loss_of_all_layers_is_refused():
    model = models.mixtral(output_router_logits=True)
    with pytest.raises(UsageError, match="adds a loss of all layers' routers"):
        family_of(model).chain(model)


def test_a_model_of_no_family_is_refused():
    with pytest.raises(UsageError, match=r"expected a Hugging Face decoder .* got TwoLinears"):
        family_of(models.TwoLinears())


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_refuse_the_microbatches_that_torch_refuses(name, degree):
    """And place stages where torch does."""
    from torch.distributed.pipelining import PipelineStage

    schedule = SCHEDULES[name]
    count = schedule.stages(degree, None)
    with fake_mesh((degree,), ("pp",)) as mesh:
        for microbatches in range(1, 12):
            stages = [
                PipelineStage(torch.nn.Identity(), index, count, torch.device("cpu"),
                              group=mesh.get_group())
                for index in schedule.stages_of(0, degree, count)
            ]  # fmt: skip
            try:
                built = schedule.build(stages, microbatches, lambda out, y: (out - y).sum())
            except ValueError:
                with pytest.raises(UsageError, match="give"):
                    schedule.check_microbatches(microbatches, degree, count)
                continue
            schedule.check_microbatches(microbatches, degree, count)
            for rank, actions in built.pipeline_order.items():
                of_rank = {
                    each.stage_index
                    for action in actions
                    if action is not None
                    for each in (action.sub_actions or (action,))
                }
                assert of_rank == set(schedule.stages_of(rank, degree, count))
