"""The blocks of a transformer compiled by ``torch.compile``, one program for all of them: engine = "compiled" of text.

Programs are made at once, before a policy's first pass, on rows of fixed length, because their code may depend on the sizes
that they are made with. So a run that is repeated or resumed has the same programs, whatever its rows are. Sizes are dynamic:
rows of other lengths need no new program. Passes with a cache, those of the sampler, are not compiled.

Roles that are adapters on one base share its blocks. Each role has programs of its own, which its first passes make: PyTorch
chooses among them by the active adapter. Reward models pass a mask to their blocks if rows have padding, and none otherwise,
so their programs are made with rows of both kinds.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.accel.programs import compiler, require_compiler
from surefoot.errors import SurefootError, announce, cause_of
from surefoot.language.models.pair_policy import PairPolicy
from surefoot.language.models.placement import layers_of
from surefoot.language.models.policy import LanguagePolicy
from surefoot.language.models.policy.passes import computing

PROGRAMS = 64
"""most programs that PyTorch keeps for the blocks of all models of a process; beyond its default of 8 it would go on eagerly"""
PROMPT, RESPONSE = 8, 16
"""tokens of the rows that programs are made with"""
CACHES = ("past_key_values", "cache", "cache_params")
"""arguments of a block that hold a cache"""
TOLERANCE = {True: 1e-3, False: 1e-1}
"""largest difference of a log-probability from the eager pass, for exact policies and others"""


def compile_blocks(*policies: LanguagePolicy | PairPolicy | None) -> None:
    """Compile the blocks of these policies before the first pass of each.

    Raises SurefootError if there is no C++ compiler. The first pass raises it if the blocks can't be compiled, or compute
    something else then.
    """
    require_compiler()
    for policy in policies:
        if policy is not None:
            policy.before_first_pass = _make_programs


def eager_blocks(policy: nn.Module) -> None:
    """Let the blocks of a policy run without programs again, so that a model that is made of them makes no others."""
    for block in layers_of(policy):
        vars(block).pop("forward", None)


def _make_programs(policy: LanguagePolicy | PairPolicy) -> None:
    """Compile, and compare a pass with the eager one."""
    blocks, started = layers_of(policy), time.perf_counter()
    wanted = _passes(policy, False)
    name = type(policy.model.backbone if isinstance(policy, PairPolicy) else policy.model).__name__
    what, numbers = f"engine='compiled': {name}", "scores" if isinstance(policy, PairPolicy) else "log-probabilities"
    announce(f"engine: compiling the block of {name}; this may take minutes …")
    torch._dynamo.config.recompile_limit = max(PROGRAMS, torch._dynamo.config.recompile_limit)
    try:
        with warnings.catch_warnings(), torch._inductor.config.patch({"cpp.cxx": (compiler(),)}):
            warnings.simplefilter("ignore")  # PyTorch's own, about its compiler
            for block in blocks:
                block.forward = MethodType(_compiled(type(block)), block)  # type: ignore[arg-type]
            for grad in (True, False):
                found = _passes(policy, grad)
    except Exception as error:
        raise SurefootError(f"{what} can't be compiled ({cause_of(error)}); set engine = 'eager'") from error
    apart = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
    if not apart <= TOLERANCE[policy.exact]:
        raise SurefootError(f"{what} has other {numbers} when compiled, by {apart:.2g}; set engine = 'eager'")
    announce(f"engine: compiled {len(blocks)} blocks in {time.perf_counter() - started:.0f} s")


@cache
def _compiled(block: type[nn.Module]) -> Callable[..., Any]:
    """The forward pass of a class of blocks, compiled unless there is a cache. Hooks stay outside the program.

    It is bound to a block as a method, so a copy of the block has its own.
    """
    eager, compiled = block.forward, torch.compile(block.forward, dynamic=True)

    @wraps(eager)
    def forward(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        cached = any(options.get(name) is not None for name in CACHES)
        return (eager if cached else compiled)(self, *inputs, **options)

    return forward


def _passes(policy: LanguagePolicy | PairPolicy, grad: bool) -> list[Tensor]:
    """What passes of each form compute; with ``grad`` each has a backward pass, which changes nothing."""
    return _reward_passes(policy, grad) if isinstance(policy, PairPolicy) else _language_passes(policy, grad)


def _language_passes(policy: LanguagePolicy, grad: bool) -> list[Tensor]:
    """Log-probabilities of two rows, and of one.   each [rows, tokens]"""
    found = []
    for rows in (2, 1):
        ids = _ids(policy, policy.readout.vocabulary, rows)
        prompt, actions = ids[:, :PROMPT], ids[:, PROMPT:]
        inputs = {"prompt": prompt, "prompt_mask": torch.ones_like(prompt, dtype=torch.bool)}
        with _with_gradient(policy, grad) as differentiate:
            evaluation = policy(inputs, actions, torch.ones_like(actions, dtype=torch.bool))
            differentiate(evaluation.log_probs.sum() + (0 if evaluation.values is None else evaluation.values.sum()))
        found.append(evaluation.log_probs.detach())
    return found


def _reward_passes(policy: PairPolicy, grad: bool) -> list[Tensor]:
    """Scores of two rows, with and without padding, and of one.   each [rows, tokens]"""
    table: Any = policy.model.backbone.get_input_embeddings()
    found = []
    for rows, padding in ((2, PROMPT), (2, 0), (1, 0)):
        ids = _ids(policy, table.weight.shape[0], rows)
        mask = torch.ones_like(ids)
        mask[1:, mask.shape[1] - padding :] = 0
        with _with_gradient(policy, grad) as differentiate, computing(policy, False, policy.bf16):
            scores = policy.model.prefix_scores(ids, mask).float() * mask
            differentiate(scores.sum())
        found.append(scores.detach())
    return found


def _ids(policy: nn.Module, vocabulary: int, rows: int) -> Tensor:
    device = next(policy.parameters()).device
    return (torch.arange(rows * (PROMPT + RESPONSE), device=device) * 7 % vocabulary).view(rows, -1)


@contextmanager
def _with_gradient(policy: nn.Module, grad: bool) -> Iterator[Callable[[Tensor], None]]:
    """A context for a pass, with a function that makes its backward pass, which changes nothing; both only with ``grad``."""
    grad = grad and not getattr(policy, "frozen", False)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad] if grad else []

    def differentiate(total: Tensor) -> None:
        if trained:
            torch.autograd.grad(total, trained, allow_unused=True)

    with torch.set_grad_enabled(bool(trained)):
        yield differentiate
