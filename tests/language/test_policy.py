"""Language models as policies. The reference runs one unpadded row at a time with the model's own logits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from surefoot import PPO_CLIP, Constraint, Objective, Reuse, SurefootError  # noqa: E402
from surefoot.core.credit import assign_credit  # noqa: E402
from surefoot.core.learner import Learner, LearnerSettings  # noqa: E402
from surefoot.core.optimizer import AdamSettings  # noqa: E402
from surefoot.core.rollout import Evaluation, LearnerState, Rollout  # noqa: E402
from surefoot.functional import successor_values  # noqa: E402
from surefoot.language.models.policy import LanguagePolicy, ReferencePolicy  # noqa: E402
from surefoot.language.models.policy.critic import Critic  # noqa: E402
from surefoot.language.models.policy.passes import in_micro_batches  # noqa: E402
from surefoot.language.models.policy.readout import Readout  # noqa: E402

from . import tiny  # noqa: E402
from .tiny import FAMILIES, VOCABULARY, WIDTH  # noqa: E402

PAD = 0
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
WITH_MORE_THAN_A_LINEAR_HEAD: dict[str, dict[str, Any]] = {
    "gemma2": SHAPE | {"head_dim": 8, "final_logit_softcapping": 30.0},
    "cohere": SHAPE | {"logit_scale": 0.25},
    "granite": SHAPE | {"logits_scaling": 3.0},
    "phi": SHAPE | {"num_key_value_heads": 4},
}
TWO = ("llama", "gpt2")


def make(kind: str, seed: int = 0, scale: float = 1.0, **changes: Any) -> Any:
    """A tiny random model; ``scale`` multiplies its output embedding."""
    if kind in FAMILIES:
        model = tiny.model(kind, seed, **changes)
    else:
        settings = WITH_MORE_THAN_A_LINEAR_HEAD[kind] | changes
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases start at 1 and 0, which would hide mistakes
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.get_output_embeddings().weight.mul_(scale)
    return model.eval()


def text(seed: int = 0, rows: int = 6, prompt: int = 5, response: int = 7) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Prompts and responses of random lengths; the first response is empty and the second full."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (rows, prompt + response), generator=generator)
    starts = torch.randint(0, prompt, (rows, 1), generator=generator)
    ends = torch.randint(1, response + 1, (rows, 1), generator=generator)
    ends[0], ends[1] = 0, response
    prompt_mask, mask = torch.arange(prompt) >= starts, torch.arange(response) < ends
    inputs = {"prompt": torch.where(prompt_mask, ids[:, :prompt], PAD), "prompt_mask": prompt_mask}
    return inputs, torch.where(mask, ids[:, prompt:], PAD), mask


def rows_of(inputs: dict[str, Tensor], actions: Tensor, mask: Tensor) -> list[tuple[list[int], list[int]]]:
    """The unpadded prompt and response of each row."""
    prompts = zip(inputs["prompt"], inputs["prompt_mask"], strict=True)
    responses = zip(actions, mask, strict=True)
    return [(p[m].tolist(), r[k].tolist()) for (p, m), (r, k) in zip(prompts, responses, strict=True)]


def naive(model: Any, batch: tuple[dict[str, Tensor], Tensor, Tensor], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropy, row by row.   [B, T]"""
    log_probs, entropy = (torch.zeros(batch[2].shape, dtype=next(model.parameters()).dtype) for _ in range(2))
    for row, (prompt, response) in enumerate(rows_of(*batch)):
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0] / temperature
        for t, token in enumerate(response):
            expected = logits[len(prompt) + t - 1].log_softmax(-1)
            log_probs[row, t], entropy[row, t] = expected[token], -(expected.exp() * expected).sum()
    return log_probs, entropy


def policy_of(model: Any, critic: Any = None, **settings: Any) -> LanguagePolicy:
    return LanguagePolicy(model, critic, PAD, **settings)


def awake(policy: LanguagePolicy, seed: int = 0) -> LanguagePolicy:
    """Set random weights in the value head, which starts at zero."""
    head = policy.value_head if policy.value_head is not None else policy.critic.head
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return policy


def gradients(policy: nn.Module, actual: Evaluation) -> dict[str, Tensor]:
    """Gradients of a random weighted sum of all outputs."""
    outputs = [x for x in (actual.log_probs, actual.entropy, actual.values) if x is not None]
    generator = torch.Generator().manual_seed(3)
    total = sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).sum() for x in outputs)
    named = dict(policy.named_parameters())
    found_gradients = torch.autograd.grad(total, list(named.values()))
    assert all(gradient.abs().max() > 1e-6 for gradient in found_gradients), "every parameter gets a gradient"
    return dict(zip(named, found_gradients, strict=True))


def near(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---- log-probabilities and entropy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
def test_log_probs_and_entropy_match_the_models_own_logits(kind: str) -> None:
    model, batch = make(kind, scale=20.0), text()
    evaluation = policy_of(model, temperature=0.7)(*batch)
    log_probs, entropy = naive(model, batch, 0.7)
    assert log_probs[batch[2]].std() > 0.5
    near(evaluation.log_probs, log_probs)
    near(evaluation.entropy, entropy)
    assert evaluation.values is None
    for x in (evaluation.log_probs, evaluation.entropy):
        assert x.dtype == torch.float32
        assert not x[~batch[2]].any(), "zeros outside the mask"


@pytest.mark.parametrize("kind", WITH_MORE_THAN_A_LINEAR_HEAD)
def test_logit_scales_soft_caps_and_head_biases_are_applied(kind: str) -> None:
    """The logits are large enough for a soft cap to have an effect."""
    model, batch = make(kind, scale=150.0), text()
    policy = policy_of(model, temperature=0.7, chunk=3)
    assert policy.readout.plain, "the test is only meaningful without the fallback to the model's own logits"
    for ours, theirs in zip(vars(policy(*batch)).values(), naive(model, batch, 0.7), strict=False):
        near(ours, theirs, 1e-4)


class Wavy(transformers.LlamaForCausalLM):
    """A model with a change to its logits that no configuration field describes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits + outputs.logits.sin()
        return outputs


def test_unknown_heads_fall_back_to_the_models_own_logits() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, batch = Wavy(transformers.LlamaConfig(**SHAPE)).eval(), text()
    policy = awake(policy_of(model, "head", temperature=0.7, chunk=3))
    assert not policy.readout.plain
    evaluation = policy(*batch)
    for ours, theirs in zip((evaluation.log_probs, evaluation.entropy), naive(model, batch, 0.7), strict=True):
        near(ours, theirs)
    plain = awake(policy_of(make("llama"), "head"))
    plain.model.load_state_dict(model.state_dict())
    near(evaluation.values, plain(*batch).values)
    gradients(policy, evaluation)


def test_soft_cap_without_visible_effect_is_still_detected() -> None:
    """The logits of a new model are far below 30, so a readout without the cap would only be wrong after training."""

    class Capped(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            outputs.logits = 30 * (outputs.logits / 30).tanh()
            return outputs

    model = Capped(transformers.LlamaConfig(**SHAPE)).eval()
    assert model(input_ids=torch.arange(8)[None]).logits.abs().max() < 1
    assert not Readout(model).plain


@pytest.mark.parametrize("chunk", [1, 5])
def test_chunked_values_and_gradients_match_the_naive_computation(chunk: int) -> None:
    """In float64, against one row at a time, for the gradients of all weights including the tied embedding."""
    model, batch = make("gpt2", scale=20.0).double(), text()
    policy = policy_of(model, temperature=0.7, chunk=chunk)
    log_probs, entropy = naive(model, batch, 0.7)
    evaluation = policy(*batch)
    assert int(batch[2].sum()) > 2 * chunk
    near((evaluation.log_probs, evaluation.entropy), (log_probs, entropy), 1e-10)
    near(gradients(policy, evaluation), gradients(policy, Evaluation(log_probs, entropy)), 1e-10)


def test_empty_prompts_are_rejected() -> None:
    inputs, actions, mask = text()
    inputs["prompt_mask"][2] = False
    with pytest.raises(SurefootError, match=r"prompt: row 2 of the batch has no token; begin empty prompts with one"):
        policy_of(make("llama"))(inputs, actions, mask)


# ---- what is read and computed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 20, None])
def test_micro_batches_by_token_budget_keep_the_row_order(tokens: int | None) -> None:
    policy, batch = awake(policy_of(make("llama", scale=20.0), "head")), text()
    with torch.no_grad():
        whole = policy(*batch)
    near(vars(in_micro_batches(policy, *batch, tokens)), vars(whole))
    near(in_micro_batches(policy.values_after, *batch, tokens), policy.values_after(*batch).detach())


def test_cost_of_a_row_is_its_number_of_real_tokens() -> None:
    inputs, actions, mask = text()
    costs = policy_of(make("llama")).costs(inputs, mask)
    assert costs.tolist() == [len(prompt) + len(response) for prompt, response in rows_of(inputs, actions, mask)]


def test_all_padding_columns_are_not_computed() -> None:
    policy, batch = policy_of(make("llama")), text()
    shapes: list[tuple[int, ...]] = []
    policy.model.model.register_forward_pre_hook(
        lambda _, __, arguments: shapes.append(arguments["input_ids"].shape), with_kwargs=True
    )
    inputs = {name: nn.functional.pad(x, (20, 0)) for name, x in batch[0].items()}
    policy(inputs, *(nn.functional.pad(x, (0, 30)) for x in batch[1:]))
    assert shapes == [(6, int(policy.costs(batch[0], batch[2]).max()))]


# ---- values -------------------------------------------------------------------------------------------------------------


def test_a_new_critic_predicts_zero_everywhere() -> None:
    model, batch = make("llama"), text()
    for critic in ("head", Critic.from_policy(model)):
        policy = policy_of(model, critic)
        assert not policy(*batch).values.any()
        assert not policy.values_after(*batch).any()
    assert not policy_of(model).values_after(*batch).any(), "also without a critic"


def test_separate_critic_shares_no_parameters_with_the_policy() -> None:
    model, batch = make("llama"), text()
    policy = awake(policy_of(model, Critic.from_policy(model)))
    named = dict(policy.named_parameters())
    own = {id(p) for p in policy.critic_parameters()}
    assert {name for name, p in named.items() if id(p) in own} == {name for name in named if name.startswith("critic.")}
    policy(*batch).values.sum().backward()
    assert all((p.grad is not None) == (id(p) in own) for p in named.values())
    policy.zero_grad()
    policy(*batch).log_probs.sum().backward()
    assert all((p.grad is not None) == (id(p) not in own) for p in named.values())


def test_value_head_has_its_own_parameters_and_its_loss_reaches_the_trunk() -> None:
    policy = awake(policy_of(make("llama"), "head"))
    assert {id(p) for p in policy.critic_parameters()} == {id(p) for p in policy.value_head.parameters()}
    policy(*text()).values.sum().backward()
    assert policy.model.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0
    assert list(policy_of(make("llama")).critic_parameters()) == []


# ---- learning -----------------------------------------------------------------------------------------------------------

EVERYTHING = replace(
    PPO_CLIP, gamma=1.0, reuse=Reuse(1, 1), normalise_advantages="batch", entropy_coefficient=0.05, reference_coefficient=0.1
)


def rollout_of(policy: LanguagePolicy, reference: ReferencePolicy, seed: int = 0, tokens: int | None = None) -> Rollout:
    """A rollout of random text, scored by the policy in micro-batches of at most ``tokens`` tokens."""
    inputs, actions, mask = text(seed, rows=8)
    scored = in_micro_batches(policy, inputs, actions, mask, tokens)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    cut = last & (torch.arange(8) % 2 == 0).unsqueeze(-1)
    beyond = in_micro_batches(policy.values_after, inputs, actions, mask, tokens)
    values = torch.zeros_like(scored.log_probs) if scored.values is None else scored.values
    return Rollout(
        inputs=inputs,
        actions=actions,
        mask=mask,
        old_log_probs=scored.log_probs,
        values=values,
        next_values=successor_values(values, beyond, truncated=cut, mask=mask),
        rewards=torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)),
        terminated=last & ~cut,
        truncated=cut,
        unit="row",
        ref_log_probs=in_micro_batches(reference.log_probs, inputs, actions, mask, tokens),
        steps=8,
    )


def updated(policy: LanguagePolicy, objective: Objective, at: LearnerState | None = None, **sizes: Any) -> tuple[Any, Learner]:
    learner = Learner(policy, objective, LearnerSettings(AdamSettings(1e-3, max_grad_norm=None), **sizes))
    rollout = rollout_of(policy, ReferencePolicy(policy_of(make("llama", seed=5))))
    return learner.update(rollout, assign_credit(rollout, objective), at or LearnerState.seeded(0, 1)), learner


@pytest.mark.parametrize(("kind", "tokens"), [("llama", 24), ("gpt2", None)])
def test_initial_ratio_is_one_for_any_micro_batch_size(kind: str, tokens: int | None) -> None:
    """Scoring and training use different micro-batches, large logits and a temperature; the learner tolerates 1e-4."""
    policy = awake(policy_of(make(kind, scale=20.0), "head", temperature=0.7, chunk=3))
    rollout = rollout_of(policy, ReferencePolicy(policy), tokens=17)
    learner = Learner(
        policy, replace(EVERYTHING, reuse=Reuse(2, 2)), LearnerSettings(AdamSettings(1e-2), micro_batch_tokens=tokens)
    )
    metrics = learner.update(rollout, assign_credit(rollout, learner.objective), LearnerState.seeded(0, 1))
    assert metrics["ratio_at_start"] == pytest.approx(1, abs=2e-5)
    assert metrics["ratio_max"] - metrics["ratio_min"] > 1e-3, "the ratio changes after the first step"


@pytest.mark.parametrize("kind", TWO)
def test_checkpointed_layers_give_the_same_gradient_and_are_computed_twice(kind: str) -> None:
    results, passes = [], []
    for checkpointing in (False, True):
        model = make(kind)
        policy = awake(policy_of(model, Critic.from_policy(model), checkpointing=checkpointing))
        counts = [0]
        count_layers(policy, counts)
        results.append(gradients(policy, policy(*text())))
        passes.append(counts[0])
    near(results[0], results[1], 1e-6)
    assert passes[1] == 2 * passes[0] > 0


def count_layers(policy: LanguagePolicy, counts: list[int]) -> None:
    """Count the forward passes of the feed-forward blocks."""

    def seen(*_: Any) -> None:
        counts[0] += 1

    for part in policy.modules():
        if hasattr(part, "gradient_checkpointing") and (hasattr(part, "mlp")):
            part.mlp.register_forward_pre_hook(seen)


def test_dropout_is_off_in_train_mode() -> None:
    """GPT-2 has dropout, and transformers checkpoints layers only in train mode."""
    model = make("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5, scale=20.0)
    policy, batch = policy_of(model, checkpointing=True).train(), text()
    expected = naive(model.eval(), batch)[0]
    policy.train()
    near(policy(*batch).log_probs, expected)
    assert not any(module.training for module in policy.modules())


def test_a_cache_works_after_a_checkpointed_pass() -> None:
    """transformers drops the cache of a checkpointed layer, which would silently corrupt sampling."""
    policy = policy_of(make("llama"), checkpointing=True)
    policy(*text()).log_probs.sum().backward()
    ids = torch.arange(2, 8)[None]
    with torch.no_grad():
        first = policy.model(input_ids=ids[:, :4], use_cache=True)
        rest = policy.model(input_ids=ids[:, 4:], past_key_values=first.past_key_values, use_cache=True).logits
        near(rest, policy.model(input_ids=ids).logits[:, 4:])


def test_a_tied_embedding_is_one_parameter_and_stays_tied() -> None:
    policy = policy_of(make("llama", tie_word_embeddings=True))
    apart = policy_of(make("llama", tie_word_embeddings=False))
    _, learner = updated(policy, Objective(baseline="mean"))
    sizes = [sum(p.numel() for p in one.parameters()) for one in (policy, apart)]
    assert sizes[1] - sizes[0] == VOCABULARY * WIDTH
    assert len(learner.optimizers["policy"].gradients) == sizes[0]
    embedding, head = policy.model.get_input_embeddings().weight, policy.model.get_output_embeddings().weight
    assert embedding is head
    before = make("llama", tie_word_embeddings=True).get_input_embeddings().weight
    assert not torch.equal(head, before), "the embedding is trained"
    assert torch.equal(head, policy.model.lm_head.weight)


def test_reference_keeps_the_initial_policy_and_gets_no_gradient() -> None:
    policy, batch = awake(policy_of(make("llama", scale=20.0), "head", temperature=0.7)), text()
    reference = ReferencePolicy(policy)
    before = policy(*batch).log_probs
    assert torch.equal(reference.log_probs(*batch), before.detach())
    updated(policy, EVERYTHING)
    assert not torch.allclose(policy(*batch).log_probs, before)
    assert torch.equal(reference.log_probs(*batch), before.detach())
    assert not any(p.requires_grad for p in reference.parameters())
    late = ReferencePolicy(policy)
    assert all(p.grad is None for p in late.parameters()), "the optimizer's gradients are not copied"
    assert not reference.log_probs(*batch).requires_grad


def test_natural_gradient_step_stays_within_the_kl_bound() -> None:
    model = make("llama", scale=20.0)
    policy = awake(policy_of(model, Critic.from_policy(model), chunk=3))
    objective = replace(EVERYTHING, reference_coefficient=0.0, reuse=None, trust_region=Constraint(0.01))
    metrics, _ = updated(policy, objective)
    assert metrics["step_taken"] == 1
    assert 0 < metrics["kl_after"] <= 0.01


# ---- precision ----------------------------------------------------------------------------------------------------------


def test_bf16_computes_in_bfloat16_but_keeps_weights_and_outputs_float32() -> None:
    batch = text()
    model = make("llama", scale=20.0)
    exact, half = (awake(policy_of(model, "head", bf16=bf16, chunk=3)) for bf16 in (False, True))
    kinds: list[torch.dtype] = []
    half.model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: kinds.append(output.dtype))
    a, b = exact(*batch), half(*batch)
    assert kinds == [torch.float32, torch.bfloat16]
    assert b.log_probs.dtype == b.values.dtype == torch.float32
    assert 0 < (a.log_probs - b.log_probs).abs().max() < 0.2
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    gradients(half, b)
