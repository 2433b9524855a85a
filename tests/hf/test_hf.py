"""Routers of transformers models, from small configurations, without a download."""

import copy
import inspect
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import khot.hf
from khot.nn import routing

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="khot[hf] is not installed")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
QWEN = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 8, "decoder_sparse_step": 1}
MODELS = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen2Moe": {**QWEN, "norm_topk_prob": False},
    "Qwen3Moe": {**QWEN, "norm_topk_prob": True, "head_dim": 16},
    "Olmoe": {"num_experts": 8, "norm_topk_prob": False},
}
MORE = {
    "DeepseekV3": {
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "routed_scaling_factor": 2.5,
    },
    "Jamba": {
        "num_experts": 8,
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "use_mamba_kernels": False,
    },
}
families = pytest.mark.parametrize("family", MODELS)
TOKENS = torch.arange(3, 23).reshape(2, 10)


def make(family):
    config = getattr(transformers, f"{family}Config")(**SMALL, **{**MODELS, **MORE}[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():  # some begin at zero, where all experts are equal
        for module in model.modules():
            if type(module).__name__.endswith("Router"):
                module.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model.eval()


@families
def test_the_models_own_rule_changes_nothing(family):
    model = make(family)
    with torch.no_grad():
        before = model(TOKENS, output_router_logits=True)
    names = khot.hf.swap_routers(model, routing.softmax_topk)
    assert len(names) == 2
    with torch.no_grad():
        after = model(TOKENS, output_router_logits=True)
        other = model(TOKENS, output_router_logits=True) if khot.hf.swap_routers(model) else None
    torch.testing.assert_close(after.logits, before.logits, rtol=0, atol=1e-6)
    assert len(after.router_logits) == len(before.router_logits) == 2
    for a, b in zip(after.router_logits, before.router_logits, strict=True):
        torch.testing.assert_close(a, b)
    assert (other.logits - before.logits).abs().max() > 1e-4  # a negative control: σ_k is another rule
    assert isinstance(model.get_submodule(names[0]), type(make(family).get_submodule(names[0])))


@families
def test_a_training_step_reaches_every_expert(family):
    model = make(family).train()
    names = khot.hf.swap_routers(model)
    batch = TOKENS[:1, :3]  # three tokens, six of sixteen pairs: most experts are not chosen
    rows = []
    for own in (False, True):
        if own:
            khot.hf.swap_routers(model, routing.softmax_topk)
        model.zero_grad()
        model(batch, labels=batch).loss.backward()
        size = model.get_submodule(names[0]).weight.grad.abs().sum(-1)
        rows.append((size > 1e-5 * size.max()).sum().item())
    assert rows[0] == 8
    assert rows[1] < 8 or family in ("Qwen2Moe", "Olmoe")  # these do not divide by the sum, and reach all as well
    before = model.get_submodule(names[0]).weight.detach().clone()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert (model.get_submodule(names[0]).weight != before).any()


@families
def test_saving_loading_and_generating(family, tmp_path):
    model = make(family)
    khot.hf.swap_routers(model)
    text = model.generate(TOKENS[:, :4], max_new_tokens=5, do_sample=False)
    assert text.shape == (2, 9)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    khot.hf.swap_routers(again)
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits)
    assert torch.equal(again.generate(TOKENS[:, :4], max_new_tokens=5, do_sample=False), text)


def test_half_precision_keeps_its_dtype():
    model = make("Mixtral").to(torch.bfloat16)
    khot.hf.swap_routers(model)
    with torch.no_grad():
        assert model(TOKENS).logits.dtype == torch.bfloat16


def test_the_count_of_a_swapped_router_may_change():
    model = make("Mixtral")
    name, *_ = khot.hf.swap_routers(model)
    model.get_submodule(name).top_k = 3
    assert model.get_submodule(name)(torch.randn(20, 32))[2].shape == (20, 3)


@pytest.mark.parametrize("sample", [True, torch.tensor(0.5)])
def test_samples_are_for_training_alone(sample):
    model = make("Mixtral")
    khot.hf.swap_routers(model, partial(routing.sigma_topk, sample=sample))
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, model(TOKENS).logits)
        model.train()
        assert not torch.equal(model(TOKENS).logits, model(TOKENS).logits)


def routed(model, name):
    """The weights of a router for some tokens."""
    tokens = torch.randn(20, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model.get_submodule(name)(tokens)[1].sum(-1)


@pytest.mark.parametrize(("family", "rule"), [("DeepseekV3", routing.sigmoid_gates), ("Jamba", routing.softmax_topk)])
def test_scales_biases_and_raw_weights_are_the_models_own(family, rule):
    model = make(family)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        before = model(TOKENS).logits
    names = khot.hf.swap_routers(model, rule)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, before, rtol=0, atol=1e-6)
    own = routed(model, names[0])
    khot.hf.swap_routers(model)
    torch.testing.assert_close(routed(model, names[0]), torch.full((20,), 2.5 if family == "DeepseekV3" else 1.0))
    assert (own.std() > 0.01) == (family == "Jamba")


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_a_token_may_have_no_expert(implementation):
    model = make("Mixtral")
    model.set_experts_implementation(implementation)
    khot.hf.swap_routers(model, routing.expert_choice)
    with torch.no_grad():
        for _ in range(3):
            assert model(TOKENS).logits.isfinite().all()


def test_what_the_route_says_of_weights_holds():
    model = make("Mixtral")
    name, *_ = khot.hf.swap_routers(model)
    torch.testing.assert_close(routed(model, name), torch.ones(20))
    khot.hf.swap_routers(model, partial(routing.sigma_topk, normalize=False))
    assert (routed(model, name) > 1.2).all()


def test_a_swapped_model_can_be_pickled_and_copied():
    model = make("Mixtral")
    khot.hf.swap_routers(model, partial(routing.sigma_topk, temperature=0.5))
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with torch.no_grad():
            assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_routes_that_take_other_scores_are_refused():
    model = make("Mixtral")
    with pytest.raises(ValueError, match=r"must take as many scores as .*gate gives, 8; it takes 16"):
        khot.hf.swap_routers(model, routing.noisy_topk)
    with pytest.raises(ValueError, match="dselect_k needs num_experts"):
        khot.hf.swap_routers(model, routing.dselect_k)


def test_routers_of_another_kind_are_refused():
    class OddRouter(nn.Linear):
        top_k = 2

    with pytest.raises(ValueError, match=r"gate must give \(logits, weights, indices\); it gives Tensor"):
        khot.hf.swap_routers(nn.ModuleDict({"gate": OddRouter(4, 8)}))


def test_groups_by_a_rule_that_is_not_known_are_refused():
    class GroupRouter(nn.Linear):
        top_k, num_group, topk_group = 2, 4, 2

        def forward(self, hidden):
            logits = super().forward(hidden)
            return logits, *(-logits).sigmoid().topk(2, -1)  # the worst, which are in no good group

    with pytest.raises(ValueError, match="must choose groups of experts by the best one or two of each"):
        khot.hf.swap_routers(nn.ModuleDict({"gate": GroupRouter(4, 8)}))


def test_probabilities_in_the_place_of_logits_are_refused():
    class ProbabilityRouter(nn.Linear):
        top_k = 2

        def forward(self, hidden):
            probs = super().forward(hidden).softmax(-1)
            return probs, *probs.topk(2, -1)

    with pytest.raises(ValueError, match=r"must give logits of 8 experts .* what looks like probabilities"):
        khot.hf.swap_routers(nn.ModuleDict({"gate": ProbabilityRouter(4, 8)}))


def test_a_model_without_routers_is_named():
    with pytest.raises(ValueError, match="got Linear, which has none"):
        khot.hf.swap_routers(nn.Linear(2, 2))


@pytest.mark.parametrize("family", [*MODELS, *MORE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_swapped_router_gives_the_scores_and_dtypes_of_its_own(family, dtype):
    model = make(family).to(dtype)
    name, *_ = khot.hf.swap_routers(model, routing.sigma_topk)
    router = model.get_submodule(name)
    for shape in ((10, 32), (2, 5, 32)):
        for is_cast in (False, True):
            hidden = torch.randn(shape, dtype=dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                logits, weights, indices = router(hidden)
                expected = type(router).khot_own.forward(router, hidden)
            assert torch.equal(logits, expected[0])
            assert (weights.dtype, weights.shape) == (expected[1].dtype, expected[1].shape)
            assert indices.shape == expected[2].shape


@pytest.mark.parametrize("family", [*MODELS, *MORE])
def test_a_swapped_model_does_not_run_its_own_routing(family, monkeypatch):
    """Each forward routed by the model's rule first, and threw it away."""
    model, calls = make(family), []
    name, *_ = khot.hf.swap_routers(model, routing.sigma_topk)
    own = type(model.get_submodule(name)).khot_own
    forward = own.forward
    monkeypatch.setattr(own, "forward", lambda *args: calls.append(own) or forward(*args))
    monkeypatch.setattr(inspect, "signature", None)
    with torch.no_grad():
        assert model.train()(TOKENS).logits.isfinite().all()
        with torch.autocast("cpu", torch.bfloat16):  # where it ran once for each router
            assert model(TOKENS).logits.isfinite().all()
        assert not calls
        router = model.get_submodule(name)
        router.khot_choice = router.khot_choice._replace(autocast=router.khot_choice.autocast._replace(linear_at=()))
        with torch.autocast("cpu", torch.bfloat16):
            model(TOKENS)
    assert len(calls) == 1  # the negative control: one that is not known to be linear runs


def test_a_router_with_noise_in_training_runs_its_own_forward():
    calls = []

    class NoisyRouter(nn.Linear):
        top_k = 2

        def forward(self, hidden):
            calls.append(len(hidden))
            logits = super().forward(hidden)
            logits = logits + torch.randn_like(logits) if self.training else logits
            best = logits.softmax(-1).topk(2, -1)
            return logits, best.values, best.indices

    model = nn.ModuleDict({"gate": NoisyRouter(4, 8)})
    khot.hf.swap_routers(model)
    calls.clear()
    first, again = (model["gate"](torch.ones(3, 4))[0] for _ in range(2))
    assert calls == [3, 3]
    assert not torch.equal(first, again)


def test_a_wrapped_route_that_loses_experts_is_refused_before_any_router_changes():
    model = make("Mixtral")
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"must give 8 probabilities .* got 4 from 8 scores"):
        khot.hf.swap_routers(model, lambda scores, k: routing.noisy_topk(scores, k))
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.long
def test_the_table_of_families_is_true():
    """docs/tables/router-families.md, where the installed transformers has the same routers."""
    from benchmarks import router_families

    page = (Path(__file__).parents[2] / "docs/tables/router-families.md").read_text(encoding="utf-8")
    lines = [line.replace("`", "") for line in page.splitlines() if line.startswith("| `")]
    told = {tuple(cell.strip() for cell in line.split("|")[1:4]) for line in lines}
    found = router_families.families()
    same = {(e.model, e.router, (e.refused or e.own_rule).replace("`", "")) for e in found} & told
    assert len(same) >= 60
    assert "not known" not in page
    assert "cannot be made here" not in page
    assert not {name for _, name, _ in told - same} & {e.router for e in found}


def test_a_wrong_scale_is_not_taken_for_the_own_rule(monkeypatch):
    """A negative control of the table."""
    from benchmarks import router_families

    (case,) = (each for each in router_families.routers() if each[1].__name__ == "DeepseekV3TopkRouter")
    assert router_families.tried(*case).own_rule == "`sigmoid_gates`"
    monkeypatch.setattr("khot.hf._routers._scale", lambda router, given: 1.0)
    assert router_families.tried(*case).own_rule == ""
    monkeypatch.undo()
    monkeypatch.setattr("khot.hf._routers._groups", lambda name, router, given: None)
    assert router_families.tried(*case).own_rule == ""


@pytest.mark.long
@pytest.mark.compile
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize(
    "route", [routing.sigma_topk, routing.balanced_sigma_topk, partial(routing.sigma_topk, margin=True)]
)
def test_swapped_models_compile_whole(route, sample):
    """Prices of experts read values on the way, which no graph could hold."""
    model = make("Mixtral").train()
    khot.hf.swap_routers(model, partial(route, sample=sample))
    losses, slopes = [], []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        model.zero_grad()
        loss = call(TOKENS, labels=TOKENS).loss
        loss.backward()
        losses.append(loss.detach())
        slopes.append(next(m.weight.grad.clone() for m in model.modules() if hasattr(m, "khot_choice")))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4 if not sample else 0.05, atol=0)
    assert slopes[1].isfinite().all()
    assert slopes[1].any()
    if not sample:
        torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-3, atol=1e-6)
