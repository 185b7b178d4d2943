"""A causal language model of ``transformers`` as two parts: a trunk that reads tokens, and a head that makes logits of them.

The parts are what makes logits at chosen positions, and in chunks, possible. Whether they are the whole model is not believed
but tried at construction, against the model's own logits; where they are not, its own are used, all of them at once.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surefoot.errors import SurefootError
from surefoot.language.optional import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOUD = 100.0
"""the largest logit of the trial: a soft cap (30 in Gemma 2) shows at this size, and not at that of a fresh model's logits"""


AHEAD = "its logits depend on later tokens, as those of an encoder do"


@torch.no_grad()
def looks_ahead(model: Any) -> bool:
    """Whether what a model says after four tokens changes when four more follow: then it is not causal.

    Tried and not believed, because ``transformers`` makes a causal class of a BERT too, and only warns. In eval mode.
    """
    embeddings = model.get_input_embeddings().weight
    ids = (torch.arange(8, device=embeddings.device) * 7 % embeddings.shape[0]).unsqueeze(0)
    with quiet():
        short, long = (model(input_ids=part, use_cache=False).logits[:, :4] for part in (ids[:, :4], ids))
    told = short.isfinite() & long.isfinite()  # weights that have diverged are told of where they are used
    return bool(told.any()) and not _close(short[told], long[told])


class Readout:
    """Hidden states and logits of a model. Holds no parameters of its own.

    model  an AutoModelForCausalLM
    tried  False for a model without contents: it is taken to be plain, and what the trial finds stays 0

    Raises SurefootError when the model's logits depend on later tokens.
    """

    def __init__(self, model: "PreTrainedModel", tried: bool = True) -> None:
        self.model: Any = model
        self.width = self.vocabulary = 0
        self.plain = True
        """whether ``head`` of ``hidden`` is the model's own logits"""
        if tried:
            with quiet():  # the trial's tokens may be the pad token, of which some models warn
                self._try()

    def states(self, ids: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """After the tokens at (row, column): hidden states [K, width], and what ``head`` makes logits of [K, …].

        ids [B, L] long; padding is behind what is real, so that no attention mask is needed.
        """
        if self.plain:
            hidden = self._trunk(ids)[rows, columns]
            return hidden, hidden
        outputs = self.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        return outputs.hidden_states[-1][rows, columns], outputs.logits[rows, columns]

    def head(self, states: Tensor) -> Tensor:
        """Logits of the next token.   [K, …] -> [K, vocabulary]"""
        return self._logits(states) if self.plain else states

    def _trunk(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """The output embedding, then the scales and the soft cap that some families' configurations name."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config
        if scale := getattr(config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if scale := getattr(config, "logits_scaling", None):  # Granite
            logits = logits / scale
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma 2
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.no_grad()
    def _try(self) -> None:
        """Find ``width``, ``vocabulary`` and ``plain``, and that the model is causal."""
        device = self.model.get_input_embeddings().weight.device
        size = int(self.model.get_input_embeddings().weight.shape[0])
        ids = (torch.arange(16, device=device) * 7 % size).view(2, 8)
        training = self.model.training
        self.model.eval()
        if looks_ahead(self.model):
            raise SurefootError(f"model={type(self.model).__name__}: {AHEAD}; use a causal language model")
        outputs = self.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        self.width, self.vocabulary = outputs.hidden_states[-1].shape[-1], outputs.logits.shape[-1]
        self.plain = self._is_plain(ids, outputs.logits)
        self.model.train(training)

    def _is_plain(self, ids: Tensor, logits: Tensor) -> bool:
        trunk = self.model.base_model
        if trunk is self.model or not isinstance(self.model.get_output_embeddings(), nn.Module):
            return False
        louder = LOUD / max(float(logits.abs().max()), 1e-6)

        def turned_up(_: nn.Module, __: Any, outputs: Any) -> Any:
            outputs.last_hidden_state = outputs.last_hidden_state * louder
            return outputs

        hook = trunk.register_forward_hook(turned_up)
        try:
            return _close(self._logits(self._trunk(ids)), self.model(input_ids=ids, use_cache=False).logits)
        except (AttributeError, TypeError, RuntimeError):  # another signature, another output, other shapes
            return False
        finally:
            hook.remove()


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to the rounding of the model's own dtype."""
    rounding = 1e-3 if a.dtype in (torch.float32, torch.float64) else 3e-2
    return a.shape == b.shape and bool((a - b).abs().max() <= rounding * b.abs().max())
