"""Split a model of ``transformers`` into a trunk that reads tokens and a head that makes logits.

So logits can be computed at chosen positions and in chunks.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surefoot.language import quiet_transformers
from surefoot.language.models.loading import logits_close
from surefoot.language.models.padding_free import Reading
from surefoot.sharding import is_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_LOGIT = 100.0
"""the largest logit of the test: a soft cap (30 in Gemma 2) shows at this size, but not at that of a fresh model's logits"""


class Readout:
    """Hidden states and logits of a model; it has no parameters of its own.

    model  an AutoModelForCausalLM

    Whether head and trunk reproduce the model's own logits is tested at construction. If not, the model's logits are used, for
    all positions at once.
    """

    plain: bool
    """whether ``head`` of ``hidden`` is the model's own logits"""

    def __init__(self, model: "PreTrainedModel") -> None:
        self.model: Any = model
        with quiet_transformers():  # the test may use the pad token, of which some models warn
            self._test()

    def states(self, read: Reading, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """After the tokens at (row, column): hidden states [K, width], and the input of ``head`` [K, …].

        Padding follows the real tokens, so no attention mask is needed.
        """
        places = read.at(rows, columns)
        if self.plain:
            hidden = self._trunk(read.ids, **read.options)[places]
            return hidden, hidden
        outputs = self.model(input_ids=read.ids, use_cache=False, output_hidden_states=True, **read.options)
        return outputs.hidden_states[-1][places], outputs.logits[places]

    @property
    def linear(self) -> nn.Linear | None:
        """The head if it is a linear layer and nothing else, whose weights are whole."""
        head, config = self.model.get_output_embeddings(), self.model.config
        scaled = any(getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "final_logit_softcapping"))
        return head if self.plain and type(head) is nn.Linear and not scaled and not is_sharded(self.model) else None

    def head(self, states: Tensor) -> Tensor:
        """Logits of the next token: the output embedding, then the scale and soft cap in some families' configurations.

        [K, …] -> [K, vocabulary]
        """
        if not self.plain:
            return states
        logits: Tensor = self.model.get_output_embeddings()(states)
        config = self.model.config
        if scale := getattr(config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if scale := getattr(config, "logits_scaling", None):  # Granite
            logits = logits / scale
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma 2
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _trunk(self, ids: Tensor, **options: Tensor) -> Tensor:
        hidden: Tensor = self.model.base_model(input_ids=ids, use_cache=False, **options).last_hidden_state
        return hidden

    @torch.no_grad()
    def _test(self) -> None:
        """Set ``width``, ``vocabulary`` and ``plain``."""
        device = self.model.get_input_embeddings().weight.device
        size = int(self.model.get_input_embeddings().weight.shape[0])
        ids = (torch.arange(16, device=device) * 7 % size).view(2, 8)
        training = self.model.training
        self.model.eval()
        logits = self.model(input_ids=ids, use_cache=False).logits
        self.vocabulary, self.plain = logits.shape[-1], True
        self.plain = self._is_plain(ids, logits)
        if self.plain:  # hidden states of every layer are recorded by hooks, which stay
            self.width = self._trunk(ids).shape[-1]
        else:
            self.width = self.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-1].shape[-1]
        self.model.train(training)

    def _is_plain(self, ids: Tensor, logits: Tensor) -> bool:
        trunk = self.model.base_model
        if trunk is self.model or not isinstance(self.model.get_output_embeddings(), nn.Module):
            return False
        factor = PROBE_LOGIT / max(float(logits.abs().max()), 1e-6)

        def scale_up(_: nn.Module, __: Any, outputs: Any) -> Any:
            outputs.last_hidden_state = outputs.last_hidden_state * factor
            return outputs

        hook = trunk.register_forward_hook(scale_up)
        try:
            return logits_close(self.head(self._trunk(ids)), self.model(input_ids=ids, use_cache=False).logits)
        except (AttributeError, TypeError, RuntimeError):  # another signature, output or shape
            return False
        finally:
            hook.remove()
