"""Reward models in the formats of ``transformers``: reading, scoring and writing classifiers of texts and of tokens.

A decoder scores a text by a linear layer without a bias, at the last token that is not the pad token of its configuration. Its
trunk and head can be separated, so it also scores prefixes. Other classifiers, such as encoders, score only whole texts. A
process reward model scores every token, and is read where steps end.
"""

import base64
import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.errors import SurefootError, did_you_mean
from surefoot.language import quiet_transformers
from surefoot.language.data.chat import ChatTemplate, Dialogue, Messages, options_of
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.loading import check_vocabulary, logits_close, no_dropout, read_tokenizer, read_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SCALE = "surefoot_reward"
"""key of config.json with what the format has no place for: the mean and std by which scores were standardised, and the head"""
LABEL = "reward"
"""name of the one label that is written"""
STEP_LABELS = ("bad", "good")
"""labels of steps that are written, as in TRL's process reward models: label 1 is the right step"""


class TextClassifier(nn.Module):
    """A classifier that scores whole texts only: one logit of the model, unchanged."""

    def __init__(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", row: int) -> None:
        super().__init__()
        self.backbone, self.tokenizer, self.row = model, tokenizer, row
        self.template = ChatTemplate(tokenizer)
        config = self.backbone.config.get_text_config()
        if config.pad_token_id is None:  # a decoder needs it to find the last token
            config.pad_token_id = self.pad_id

    @property
    def pad_id(self) -> int:
        """The id that fills rows; it has no effect under the mask."""
        return int(self.tokenizer.pad_token_id or 0)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The label's logit of each text.   ids [B, L], mask [B, L] -> [B]"""
        logits: Tensor = self.backbone(input_ids=ids, attention_mask=mask.long()).logits
        return logits[:, self.row]

    def encode(self, prompt: str | Messages, response: str) -> list[int]:
        """The ids of prompt and response as one text, with its tokenizer's special tokens; messages by its template."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt + response)["input_ids"])
        return self.template.render(Dialogue([*prompt, {"role": "assistant", "content": response}], options_of(prompt)))


def classifier_kind(config: "PreTrainedConfig", trust_remote_code: bool = False) -> Literal["texts", "tokens"] | None:
    """What a classifier scores, by its configuration: it is loaded with every weight by AutoModelForSequenceClassification, or
    by AutoModelForTokenClassification. None for other models.
    """
    names = config.architectures or []
    if any(name.endswith("ForTokenClassification") for name in names):
        return "tokens"
    own = trust_remote_code and "AutoModelForSequenceClassification" in (getattr(config, "auto_map", None) or {})
    return "texts" if own or any(name.endswith("ForSequenceClassification") for name in names) else None


def read_classifier(
    name: str, config: "PreTrainedConfig", label: str | None, trust_remote_code: bool = False, as_stored: bool = False
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, int]":
    """A classifier from a folder or hub id, as ``read_weights`` loads it; its tokenizer; the index of the label that scores.

    label  the label whose logit is the reward; None: the only one; of tokens the last, as TRL writes it

    Raises SurefootError for a model of another class, an unknown label, several labels without one named, and missing parts.
    """
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    kind = classifier_kind(config, trust_remote_code)
    if kind is None:
        own = ", ".join(config.architectures or []) or config.model_type or "model without a type"
        raise SurefootError(
            f"model={name!r}: is not a reward model ({own}); use one that AutoModelForSequenceClassification of transformers "
            "loads, or train one with kind = 'reward'"
        )
    labels = [str(text) for _, text in sorted((config.id2label or {}).items())]
    if kind == "tokens" and len(labels) > 2:
        raise SurefootError(f"model={name!r}: has {len(labels)} labels ({_listed(labels)}); a process reward model has two")
    row = len(labels) - 1 if kind == "tokens" and label is None else _label_row(name, labels, label)
    auto = AutoModelForTokenClassification if kind == "tokens" else AutoModelForSequenceClassification
    model = read_weights(auto, name, config, trust_remote_code, as_stored)
    tokenizer = read_tokenizer(name, trust_remote_code)
    check_vocabulary(name, model, tokenizer)
    return model, tokenizer, row


def _label_row(name: str, labels: list[str], label: str | None) -> int:
    if label is None:
        if len(labels) == 1:
            return 0
        raise SurefootError(
            f"model={name!r}: has {len(labels)} labels ({_listed(labels)}); set label to the one whose logit is the reward"
        )
    if label not in labels:
        raise SurefootError(
            f"model={name!r}: has no label {label!r}{did_you_mean(label, labels)} (it has: {_listed(labels)}); set one of them"
        )
    return labels.index(label)


def _listed(labels: list[str], most: int = 8) -> str:
    return ", ".join([*labels[:most], *(["…"] if len(labels) > most else [])])


@torch.no_grad()
def parts_of(model: "PreTrainedModel", row: int, of_tokens: bool) -> "tuple[PreTrainedModel, nn.Linear] | None":
    """Trunk and head of a classifier, if the head's output is the model's logit; None for any other model.

    row        of the label that scores
    of_tokens  it scores every token; of two labels, the head's output is the log-odds of this one
    """
    trunk: Any = model.base_model
    heads = [child for child in model.children() if child is not trunk and any(True for _ in child.parameters())]
    if trunk is model or len(heads) != 1 or not isinstance(heads[0], nn.Linear):
        return None
    whole = heads[0]
    if not _reads_tokens(model, trunk, whole, of_tokens):
        return None
    head = nn.Linear(whole.in_features, 1, device="meta").to_empty(device="cpu")
    bias = torch.zeros(whole.out_features) if whole.bias is None else whole.bias
    for own, all_labels in ((head.weight, whole.weight), (head.bias, bias)):
        logit = all_labels[row : row + 1]
        own.copy_(logit - all_labels[1 - row : 2 - row] if of_tokens and len(all_labels) == 2 else logit)
    return trunk, head


@torch.no_grad()
def _reads_tokens(model: "PreTrainedModel", trunk: Any, head: nn.Linear, every: bool) -> bool:
    """Whether the logits are the head's output at every token, or at the last one, and no hidden state depends on later tokens,
    by a test.
    """
    table = model.get_input_embeddings().weight
    assert isinstance(table, Tensor)
    config = model.config.get_text_config()
    ids = torch.arange(16, device=table.device).mul(7).remainder(table.shape[0]).view(2, 8)
    if config.pad_token_id is not None:
        ids = torch.where(ids == config.pad_token_id, (config.pad_token_id + 1) % table.shape[0], ids)
    try:
        with quiet_transformers():
            hidden, short = (trunk(input_ids=x).last_hidden_state for x in (ids, ids[:, :4]))
            theirs = torch.cat([model(input_ids=row.unsqueeze(0)).logits for row in ids])
    except (AttributeError, TypeError, ValueError, RuntimeError):  # another signature, output or shape
        return False
    if hidden.shape[:2] != ids.shape or theirs.shape != (2, *((8,) if every else ()), head.out_features):
        return False
    ours = head(hidden if every else hidden[:, -1])
    finite = bool(hidden.isfinite().all())
    return not finite or (logits_close(short, hidden[:, :4]) and logits_close(ours, theirs))


# ---- writing ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def make_classifier(
    trunk: "PreTrainedModel", weight: Tensor, pad_id: int, bias: Tensor | None = None
) -> "PreTrainedModel | None":
    """A trunk and a head as the classifier of the trunk's family; None if ``transformers`` has none that scores by them. The
    trunk is shared, not copied.

    weight  of the head   [1, width]
    bias    of the head of a process reward model, which is written as a classifier of tokens: its logits are 0 and the head's
            output, for ``STEP_LABELS``   [1]
    """
    from transformers.models.auto import modeling_auto

    of_tokens = bias is not None
    known: Any = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if of_tokens:
        known = modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    if type(trunk.config) not in known:
        return None
    config = copy.deepcopy(trunk.config)
    labels = STEP_LABELS if of_tokens else (LABEL,)
    config.num_labels, config.id2label = len(labels), dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    if not of_tokens:
        config.problem_type = "regression"  # servers then return the logit itself, without a sigmoid
    config.get_text_config().pad_token_id = pad_id
    no_dropout(config)
    with torch.device("meta"), quiet_transformers():
        model: PreTrainedModel = known[type(config)](config)
    heads = [name for name, child in model.named_children() if isinstance(child, nn.Linear)]
    if type(model.base_model) is not type(trunk) or len(heads) != 1:
        return None
    of_trunk = next(p.dtype for p in trunk.parameters() if p.is_floating_point())
    head = nn.Linear(weight.shape[1], len(labels), bias=of_tokens, device="meta")
    for name, numbers in (("weight", weight), ("bias", bias)):
        if numbers is not None:
            rows = torch.cat([torch.zeros_like(numbers), numbers]) if of_tokens else numbers
            setattr(head, name, nn.Parameter(rows.detach().to(of_trunk, copy=True), requires_grad=False))
    setattr(model, model.base_model_prefix, trunk)
    setattr(model, heads[0], head)
    model.eval()
    return model if _reads_tokens(model, trunk, head, of_tokens) else None


def padding_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> "tuple[PreTrainedTokenizerBase, int, bool]":
    """A copy that pads on the right with a token other than EOS, that token's id, and whether it pads with it.

    ``transformers`` scores the last token that is not padding. If EOS were padding, it would score the token before EOS. No
    token is added, and no ordinary token is made special: that would change how text is split.
    """
    pad_id = Tokens(tokenizer).pad_id
    copied = copy.deepcopy(tokenizer)
    copied.padding_side = "right"
    if copied.pad_token_id != pad_id and pad_id in {*copied.all_special_ids, *copied.added_tokens_decoder}:
        copied.pad_token = copied.convert_ids_to_tokens(pad_id)
    return copied, pad_id, copied.pad_token_id == pad_id


@dataclass(frozen=True)
class Scale:
    """What config.json has of a reward model that was written here.

    offset        the mean score, which rewards subtract
    mean, std     of the head's output
    weight, bias  of the head: the written weight is divided by std, which rounds it   [1, width], [1]
    pooled        whether the score is the sum of the head's outputs over the answer
    plain         whether the training rows were text, or messages; None: not known
    """

    offset: float
    mean: float
    std: float
    weight: Tensor
    bias: Tensor
    pooled: bool = False
    plain: bool | None = None

    def record(self) -> dict[str, Any]:
        """As JSON, with the head as base64 of its weight and bias in float32."""
        numbers = torch.cat([self.weight.detach().flatten(), self.bias.detach()]).to("cpu", torch.float32)
        head = base64.b64encode(numbers.numpy().astype("<f4").tobytes()).decode()
        others = {"pooled": self.pooled or None, "plain": self.plain}
        others = {name: value for name, value in others.items() if value is not None}
        return {"offset": self.offset, "mean": self.mean, "std": self.std, "head": head, **others}


def read_scale(config: "PreTrainedConfig") -> Scale | None:
    """The scale of a reward model that was written here; None for any other.

    Raises SurefootError if it is damaged, or has numbers that are not finite.
    """
    scale = getattr(config, SCALE, None)
    if scale is None:
        return None
    names = ("offset", "mean", "std")
    if not isinstance(scale, dict) or not all(isinstance(scale.get(name), (int, float)) for name in names):
        raise SurefootError(f"config.json: {SCALE}={scale!r}: must have the numbers {', '.join(names)}; copy the whole folder")
    if bad := [name for name in names if not math.isfinite(scale[name])]:
        raise SurefootError(f"config.json: {SCALE}.{bad[0]}={scale[bad[0]]}: is not finite; copy the whole folder")
    try:
        head = torch.from_numpy(np.frombuffer(base64.b64decode(scale["head"], validate=True), "<f4").astype(np.float32))
    except (KeyError, TypeError, ValueError) as error:
        raise SurefootError(f"config.json: {SCALE}.head: can't be read ({error}); copy the whole folder") from None
    offset, mean, std = (float(scale[name]) for name in names)
    return Scale(offset, mean, std, head[:-1].unsqueeze(0), head[-1:], scale.get("pooled") is True, scale.get("plain"))
