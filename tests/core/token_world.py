"""A world of tokens in a page: a tiny causal transformer, a score for copying the prompt, a frozen reference.

It fills the same ``Rollout`` as control does, so ``run_loop``, ``assign_credit`` and ``Learner`` are used as they are. Prompts
are two letters; the best response repeats both and ends. Responses end with EOS or are cut at the length limit, and what a
cut response would still have earned is bootstrapped by V.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from surefoot.core.rollout import Evaluation, LearnerState, Policy, Rollout
from surefoot.functional import (
    kl_k1,
    kl_shaped_rewards,
    masked_mean,
    place_scores,
    successor_values,
    token_entropy,
    token_log_probs,
)

VOCABULARY, EOS, PAD, FIRST_LETTER = 10, 0, 1, 2
PROMPT, LIMIT = 2, 8


class Transformer(Policy):
    """One causal block with a head for the next token and a head for the value of every prefix."""

    def __init__(self, seed: int, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.heads = heads
            self.tokens = nn.Embedding(VOCABULARY, width)
            self.places = nn.Embedding(PROMPT + LIMIT, width)
            self.attention = nn.Linear(width, 3 * width)
            self.mixed = nn.Linear(width, width)
            self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
            self.next_token, self.value = nn.Linear(width, VOCABULARY), nn.Linear(width, 1)
        nn.init.normal_(self.next_token.weight, std=0.01, generator=torch.Generator().manual_seed(seed))
        for start in (self.next_token.bias, self.value.weight, self.value.bias):
            nn.init.zeros_(start)
        nn.init.constant_(self.next_token.bias[EOS], 1.0)  # as after supervised training: most responses end

    def outputs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the next token and the value, after every prefix.   [B, L] -> [B, L, vocabulary], [B, L]"""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attention(self.norms[0](x)).chunk(3, -1)
        )
        x = x + self.mixed(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = self.norms[2](x + self.narrow(torch.relu(self.wide(self.norms[1](x)))))
        return self.next_token(x), self.value(x).squeeze(-1)

    def forward(self, inputs: Tensor, actions: Tensor, mask: Tensor | None = None) -> Evaluation:
        """Tokens of prompt and response [B, P + T] and the response [B, T], scored by the prefix before each token."""
        logits, values = self.outputs(inputs)
        before = slice(inputs.shape[1] - actions.shape[1] - 1, -1)
        return Evaluation(token_log_probs(logits[:, before], actions), token_entropy(logits[:, before]), values[:, before])


def copying(prompts: Tensor, responses: Tensor, mask: Tensor) -> Tensor:
    """The share of (first letter, second letter, EOS) that stands where it should.   [B, P], [B, T] -> [B]"""
    wanted = torch.cat([prompts, torch.full_like(prompts[:, :1], EOS)], -1)
    right = (responses == wanted_like(wanted, responses)) & mask
    return right[:, : wanted.shape[1]].to(torch.float32).mean(-1)


def wanted_like(wanted: Tensor, responses: Tensor) -> Tensor:
    """What is wanted, padded to the length of the responses with something that is never there."""
    beyond = torch.full((len(wanted), responses.shape[1] - wanted.shape[1]), -1)
    return torch.cat([wanted, beyond], -1)


class TokenCollector:
    """Prompts at random, responses by the policy, the score at the last token, and −β·k1 to the reference at every one."""

    def __init__(self, policy: Transformer, beta: float, responses: int = 64) -> None:
        self.policy, self.beta, self.responses = policy, beta, responses
        self.reference = copy.deepcopy(policy).requires_grad_(False)

    @torch.no_grad()
    def collect(self, state: LearnerState) -> Rollout:
        """One response to each of as many random prompts."""
        generator = state.generators["sample"]
        prompts = torch.randint(FIRST_LETTER, VOCABULARY, (self.responses, PROMPT), generator=generator)
        tokens, mask = self._respond(prompts, generator)
        actions = tokens[:, PROMPT:]
        scored, reference = self.policy(tokens, actions, mask), self.reference(tokens, actions, mask)
        last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
        terminated, truncated = last & (actions == EOS), last & (actions != EOS)
        beyond = self.policy.outputs(tokens)[1][:, -1]
        scores = torch.where(terminated.any(-1), copying(prompts, actions, mask), -1.0)
        rewards = kl_shaped_rewards(place_scores(scores, mask), scored.log_probs, reference.log_probs, mask, self.beta)
        return Rollout(
            inputs=tokens,
            actions=actions,
            mask=mask,
            old_log_probs=scored.log_probs,
            values=scored.values,
            next_values=successor_values(scored.values, beyond, truncated=truncated, mask=mask),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            unit="row",
            ref_log_probs=reference.log_probs,
            steps=self.responses,
            metrics={
                "score": float(scores.mean()),
                "kl_reference": float(masked_mean(kl_k1(scored.log_probs, reference.log_probs), mask)),
                "length": float(mask.sum(-1).float().mean()),
                "shortest": float(mask.sum(-1).min()),
                "cut": float(truncated.any(-1).float().mean()),
            },
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing moves here: randomness is the state's, and the reference is frozen."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to continue."""

    def _respond(self, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens of prompt and response [B, P + T], and which of the response were decided [B, T]."""
        tokens, going = prompts, torch.ones(len(prompts), dtype=torch.bool)
        mask = []
        for _ in range(LIMIT):
            probabilities = self.policy.outputs(tokens)[0][:, -1].softmax(-1)
            drawn = torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
            tokens = torch.cat([tokens, torch.where(going, drawn, PAD).unsqueeze(-1)], -1)
            mask.append(going)
            going = going & (drawn != EOS)
        return tokens, torch.stack(mask, -1)
