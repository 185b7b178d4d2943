"""The engine "continuous": continuous batching of ``transformers`` with a paged cache, on the trainer's own weights.

A response that ends frees its place for the next one at once, so memory is bounded however many responses a batch has.
"""

from typing import Any

import torch

from surefoot.core.seeding import any_algorithm, derived_seed
from surefoot.errors import SurefootError, cause_of
from surefoot.language import quiet_transformers
from surefoot.language.sampling.engines import Engine, EngineName, Request, Samples, check_request, samples_of
from surefoot.language.sampling.sampler import eval_mode

PAGE = 256
"""tokens of a page of the cache, unless prompt and response are shorter"""
ROWS = 256
"""responses in progress at a time"""


class Continuous(Engine):
    """Samples with ``model.generate_batch``. All responses to a request share one random stream, whose seed comes from theirs.

    rows   most responses in progress; None: ``ROWS``
    """

    name: EngineName = "continuous"
    reason = "set by sampling.engine"
    exact = False

    def __init__(self, model: Any, rows: int | None = None) -> None:
        self.model, self.rows = model, rows or ROWS
        if not callable(getattr(model, "generate_batch", None)):
            raise SurefootError(
                f"sampling.engine='continuous': {type(model).__name__} has no generate_batch; set engine = 'auto', or install "
                "the pinned transformers"
            )

    def sample(self, request: Request) -> Samples:
        """Raises SurefootError when ``transformers`` fails, or can't batch this model's attention or cache."""
        check_request(self.model, request)
        device = self.model.get_input_embeddings().weight.device
        prompts = [list(prompt) for prompt in request.prompts for _ in range(request.samples)]
        devices = [device] if device.type == "cuda" else []
        try:
            with quiet_transformers(), eval_mode(self.model), any_algorithm(), torch.random.fork_rng(devices=devices):
                outputs = self.model.generate_batch(prompts, **self._settings(request, prompts))
        except Exception as error:
            raise SurefootError(
                f"sampling.engine='continuous': transformers raised {cause_of(error)}; set engine = 'auto'"
            ) from error
        failed = next((output.error for output in outputs.values() if output.error), None)
        if failed is not None or len(outputs) < len(prompts):
            raise SurefootError(
                f"sampling.engine='continuous': transformers answered {len(outputs)} of {len(prompts)} prompts "
                f"({failed or 'its thread ended'}); set engine = 'auto'"
            )
        answers = [(output.generated_tokens, output.logprobs, False) for output in outputs.values()]
        return samples_of(request, answers, device, "continuous", self.version)

    def _settings(self, request: Request, prompts: list[list[int]]) -> dict[str, Any]:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        longest = max(map(len, prompts)) + request.max_tokens
        page = min(PAGE, max(16, longest))
        at_once = min(self.rows, len(prompts))
        drawn = {} if request.greedy else {"temperature": request.temperature, "top_k": 0, "top_p": 1.0}
        return {
            "generation_config": GenerationConfig(
                do_sample=not request.greedy,
                max_new_tokens=request.max_tokens,
                eos_token_id=list(request.eos_ids) or None,
                pad_token_id=request.pad_id,
                **drawn,
            ),
            "continuous_batching_config": ContinuousBatchingConfig(
                return_logprobs=True,
                seed=0 if request.greedy else derived_seed("continuous", *request.seeds),
                page_size=page,
                num_blocks=at_once * (-(-longest // page) + 1),
                max_batch_tokens=max(longest, at_once),
                max_requests_per_batch=at_once,
                allow_block_sharing=False,
                auto_switch_to_flash=False,  # it may download kernels
            ),
        }
