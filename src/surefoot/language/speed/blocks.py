"""The blocks of a transformer compiled by ``torch.compile``, one program for all of them: engine = "compiled" of text.

Programs are made at once, before a policy's first pass, on rows of fixed length, because their code may depend on the sizes
that they are made with. So a run that is repeated or resumed has the same programs, whatever its rows are. Sizes are dynamic:
rows of other lengths need no new program. Passes with a cache, those of the sampler, are not compiled.
"""

import time
import warnings
from collections.abc import Callable
from functools import cache, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.core.steps.programs import announce, compiler, require_compiler
from surefoot.errors import SurefootError, cause_of
from surefoot.language.models.placement import layers_of
from surefoot.language.models.policy import LanguagePolicy

PROGRAMS = 64
"""most programs that PyTorch keeps for the blocks of all models of a process; beyond its default of 8 it would go on eagerly"""
PROMPT, RESPONSE = 8, 16
"""tokens of the rows that programs are made with"""
CACHES = ("past_key_values", "cache", "cache_params")
"""arguments of a block that hold a cache"""
TOLERANCE = {True: 1e-3, False: 1e-1}
"""largest difference of a log-probability from the eager pass, for exact policies and others"""


def compile_blocks(*policies: LanguagePolicy | None) -> None:
    """Compile the blocks of these policies before the first pass of each.

    Raises SurefootError if there is no C++ compiler. The first pass raises it if the blocks can't be compiled, or compute
    something else then.
    """
    require_compiler()
    for policy in policies:
        if policy is not None:
            policy.before_first_pass = _make_programs


def _make_programs(policy: LanguagePolicy) -> None:
    """Compile, and compare a pass with the eager one."""
    blocks, started = layers_of(policy), time.perf_counter()
    wanted = [_pass(policy, rows, grad=False) for rows in (2, 1)]
    what = f"engine='compiled': {type(policy.model).__name__}"
    announce(f"engine: compiling the block of {type(policy.model).__name__}; this may take minutes …")
    torch._dynamo.config.recompile_limit = max(PROGRAMS, torch._dynamo.config.recompile_limit)
    try:
        with warnings.catch_warnings(), torch._inductor.config.patch({"cpp.cxx": (compiler(),)}):
            warnings.simplefilter("ignore")  # PyTorch's own, about its compiler
            for block in blocks:
                block.forward = MethodType(_compiled(type(block)), block)  # type: ignore[arg-type]
            for grad in (True, False):
                found = [_pass(policy, rows, grad) for rows in (2, 1)]
    except Exception as error:
        raise SurefootError(f"{what} can't be compiled ({cause_of(error)}); set engine = 'eager'") from error
    apart = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
    if not apart <= TOLERANCE[policy.exact]:
        raise SurefootError(f"{what} has other log-probabilities when compiled, by {apart:.2g}; set engine = 'eager'")
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


def _pass(policy: LanguagePolicy, rows: int, grad: bool) -> Tensor:
    """Log-probabilities of rows of fixed tokens; with ``grad`` also a backward pass, which changes nothing.   [rows, tokens]"""
    vocabulary = policy.readout.vocabulary
    device = next(policy.parameters()).device
    ids = (torch.arange(rows * (PROMPT + RESPONSE), device=device) * 7 % vocabulary).view(rows, -1)
    prompt, actions = ids[:, :PROMPT], ids[:, PROMPT:]
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    grad = grad and bool(trained)
    with torch.set_grad_enabled(grad):
        inputs = {"prompt": prompt, "prompt_mask": torch.ones_like(prompt, dtype=torch.bool)}
        evaluation = policy(inputs, actions, torch.ones_like(actions, dtype=torch.bool))
        if grad:
            total = evaluation.log_probs.sum() + (0 if evaluation.values is None else evaluation.values.sum())
            torch.autograd.grad(total, trained, allow_unused=True)
    log_probs: Tensor = evaluation.log_probs.detach()
    return log_probs
