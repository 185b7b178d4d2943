"""Reward models in the format of ``AutoModelForSequenceClassification``: reading, scoring and writing them.

A decoder of ``transformers`` scores a text by a linear layer without a bias, at the last token that is not the pad token of its
configuration. Its trunk and head can be separated, so it also scores prefixes. Other classifiers, such as encoders, score only
whole texts.
"""

import base64
import binascii
import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.errors import SurefootError, did_you_mean
from surefoot.files import read_table
from surefoot.language import quiet_transformers
from surefoot.language.data.tokens import ChatTemplate, Dialogue, Messages, Tokens, options_of
from surefoot.language.models.loading import (
    check_vocabulary,
    is_classifier,
    logits_close,
    no_dropout,
    read_config,
    read_tokenizer,
    read_weights,
)
from surefoot.store.tensors import open_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SCALE = "surefoot_reward"
"""key of config.json with what the format has no place for: the mean and std by which scores were standardised, and the head"""
LABEL = "reward"
"""name of the one label that is written"""


@dataclass(frozen=True)
class Classifier:
    """A classifier with one label chosen.

    model   the whole model
    row     the label's index
    pad_id  the token that ``transformers`` skips when it looks for the last one; None: no token is skipped
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    row: int
    pad_id: int | None

    def parts(self) -> "tuple[PreTrainedModel, nn.Linear] | None":
        """Trunk and head, if the head's output at the last token is the model's; None for any other model."""
        trunk: Any = self.model.base_model
        heads = [child for child in self.model.children() if child is not trunk and any(True for _ in child.parameters())]
        if trunk is self.model or len(heads) != 1 or not isinstance(heads[0], nn.Linear):
            return None
        whole = heads[0]
        if not _reads_last_token(self.model, trunk, whole):
            return None
        head = nn.Linear(whole.in_features, 1, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            head.weight.copy_(whole.weight[self.row : self.row + 1])
            head.bias.copy_(torch.zeros(1) if whole.bias is None else whole.bias[self.row : self.row + 1])
        return trunk, head


class TextClassifier(nn.Module):
    """A classifier that scores whole texts only: one logit of the model, unchanged."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.backbone, self.tokenizer, self.row = classifier.model, classifier.tokenizer, classifier.row
        self.template = ChatTemplate(classifier.tokenizer)
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


def read_classifier(
    name: str, label: str | None = None, trust_remote_code: bool = False, as_stored: bool = False
) -> Classifier:
    """A classifier from a folder or hub id, in float32, or as ``read_weights`` stores it, and eval mode.

    label  the label whose logit is the reward; None: the only one

    Raises SurefootError for a model of another class, an unknown label, several labels without one named, and missing parts.
    """
    from transformers import AutoModelForSequenceClassification

    config = read_config(name, trust_remote_code)
    if not is_classifier(config, trust_remote_code):
        kind = ", ".join(config.architectures or []) or config.model_type or "model without a type"
        raise SurefootError(
            f"model={name!r}: is not a reward model ({kind}); use one that AutoModelForSequenceClassification of transformers "
            "loads, or train one with kind = 'reward'"
        )
    row = label_row(name, config, label)
    model = read_weights(AutoModelForSequenceClassification, name, config, trust_remote_code, as_stored)
    tokenizer = read_tokenizer(name, trust_remote_code)
    check_vocabulary(name, model, tokenizer)
    pad_id = config.get_text_config().pad_token_id
    return Classifier(model, tokenizer, row, None if pad_id is None else int(pad_id))


def label_row(name: str, config: "PreTrainedConfig", label: str | None) -> int:
    """The index of a label. Raises SurefootError for an unknown one, and for several without one named."""
    labels = [str(text) for _, text in sorted((config.id2label or {}).items())]
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
def _reads_last_token(model: "PreTrainedModel", trunk: Any, head: nn.Linear) -> bool:
    """Whether the logits are the head's output at the last token, and no hidden state depends on later tokens, by a test."""
    table = model.get_input_embeddings().weight
    assert isinstance(table, Tensor)
    config = model.config.get_text_config()
    ids = torch.arange(16, device=table.device).mul(7).remainder(table.shape[0]).view(2, 8)
    if config.pad_token_id is not None:
        ids = torch.where(ids == config.pad_token_id, (config.pad_token_id + 1) % table.shape[0], ids)
    try:
        with quiet_transformers():
            hidden = trunk(input_ids=ids).last_hidden_state
            short = trunk(input_ids=ids[:, :4]).last_hidden_state
            theirs = torch.cat([model(input_ids=row.unsqueeze(0)).logits for row in ids])
    except (AttributeError, TypeError, ValueError, RuntimeError):  # another signature, output or shape
        return False
    if hidden.shape[:2] != ids.shape or theirs.shape != (2, head.out_features):
        return False
    finite = bool(hidden.isfinite().all())
    return not finite or (logits_close(short, hidden[:, :4]) and logits_close(head(hidden[:, -1]), theirs))


# ---- one score per token -----------------------------------------------------------------------------------------------

STEP_LABELS = ("bad", "good")
"""labels of steps that are written, as in TRL's process reward models: label 1 is the right step"""


def is_token_classifier(config: "PreTrainedConfig") -> bool:
    """Whether AutoModelForTokenClassification loads the model with every weight, by its configuration."""
    return any(name.endswith("ForTokenClassification") for name in config.architectures or [])


@torch.no_grad()
def read_token_classifier(
    name: str, label: str | None, trust_remote_code: bool, as_stored: bool
) -> "tuple[PreTrainedModel, nn.Linear, PreTrainedTokenizerBase, PreTrainedConfig]":
    """Trunk, head, tokenizer and configuration of a process reward model: the head's output is the log-odds of the good label.

    label  the good one of two; None: the second, as TRL writes it

    Raises SurefootError for more than two labels, an unknown label, and a model whose scores depend on later tokens.
    """
    from transformers import AutoModelForTokenClassification

    config = read_config(name, trust_remote_code)
    labels = [str(text) for _, text in sorted((config.id2label or {}).items())]
    if len(labels) > 2:
        raise SurefootError(f"model={name!r}: has {len(labels)} labels ({_listed(labels)}); a process reward model has two")
    row = len(labels) - 1 if label is None else label_row(name, config, label)
    model = read_weights(AutoModelForTokenClassification, name, config, trust_remote_code, as_stored)
    trunk: Any = model.base_model
    heads = [child for child in model.children() if child is not trunk and any(True for _ in child.parameters())]
    if len(heads) != 1 or not isinstance(heads[0], nn.Linear) or not _reads_each_token(model, trunk, heads[0]):
        raise SurefootError(
            f"model={name!r}: {type(model).__name__} does not score each token from those before it; use a process reward "
            "model with a linear layer on a causal decoder"
        )
    weight = heads[0].weight
    bias = torch.zeros(len(weight)) if heads[0].bias is None else heads[0].bias
    sign = torch.zeros(len(weight), dtype=weight.dtype)
    sign[row] += 1
    if len(labels) == 2:
        sign[1 - row] -= 1
    head = nn.Linear(weight.shape[1], 1, device="meta").to_empty(device="cpu")
    head.weight.copy_(sign @ weight)
    head.bias.copy_(sign @ bias)
    tokenizer = read_tokenizer(name, trust_remote_code)
    check_vocabulary(name, model, tokenizer)
    return trunk, head, tokenizer, config


def _reads_each_token(model: "PreTrainedModel", trunk: Any, head: nn.Linear) -> bool:
    """Whether the logits are the head's output at every token, and no hidden state depends on later tokens, by a test."""
    table = model.get_input_embeddings().weight
    assert isinstance(table, Tensor)
    ids = torch.arange(16, device=table.device).mul(7).remainder(table.shape[0]).view(2, 8)
    with quiet_transformers():
        hidden, short = (trunk(input_ids=x).last_hidden_state for x in (ids, ids[:, :4]))
        theirs = model(input_ids=ids).logits
    return logits_close(short, hidden[:, :4]) and logits_close(head(hidden), theirs)


def _empty_classifier(make: Any, config: Any, trunk: "PreTrainedModel", pad_id: int) -> "tuple[PreTrainedModel, str] | None":
    """A classifier of the trunk's family without weights, and the name of its head; None if it has another trunk or no single
    linear head.
    """
    config.get_text_config().pad_token_id = pad_id
    no_dropout(config)
    with torch.device("meta"), quiet_transformers():
        model: PreTrainedModel = make(config)
    heads = [name for name, child in model.named_children() if isinstance(child, nn.Linear)]
    return (model, heads[0]) if type(model.base_model) is type(trunk) and len(heads) == 1 else None


@torch.no_grad()
def make_token_classifier(trunk: "PreTrainedModel", head: nn.Linear, pad_id: int) -> "PreTrainedModel | None":
    """A trunk and a head as the token classifier of the trunk's family, with the logits 0 and the head's output for
    ``STEP_LABELS``; None if ``transformers`` has none. The trunk is shared, not copied.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING as KNOWN

    if type(trunk.config) not in KNOWN:
        return None
    config = copy.deepcopy(trunk.config)
    config.num_labels, config.id2label = 2, dict(enumerate(STEP_LABELS))
    config.label2id = {label: number for number, label in enumerate(STEP_LABELS)}
    if (made := _empty_classifier(KNOWN[type(config)], config, trunk, pad_id)) is None:
        return None
    model, name = made
    whole = nn.Linear(head.in_features, 2, device="meta").to_empty(device="cpu")
    whole.weight.copy_(torch.cat([torch.zeros_like(head.weight), head.weight]))
    whole.bias.copy_(torch.cat([torch.zeros_like(head.bias), head.bias]))
    setattr(model, model.base_model_prefix, trunk)
    of_trunk = next(p.dtype for p in trunk.parameters() if p.is_floating_point())
    setattr(model, name, whole.to(of_trunk).requires_grad_(False))
    model.eval()
    return model if _reads_each_token(model, trunk, whole) else None


# ---- writing ------------------------------------------------------------------------------------------------------------


def make_classifier(trunk: "PreTrainedModel", weight: Tensor, pad_id: int) -> "PreTrainedModel | None":
    """A trunk and the weights of a head as the classifier of the trunk's family; None if ``transformers`` has none that scores
    by them. The trunk is shared, not copied.   weight [1, width]
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as KNOWN

    if type(trunk.config) not in KNOWN:
        return None
    config = copy.deepcopy(trunk.config)
    config.num_labels, config.id2label, config.label2id = 1, {0: LABEL}, {LABEL: 0}
    config.problem_type = "regression"  # servers then return the logit itself, without a sigmoid
    if (made := _empty_classifier(KNOWN[type(config)], config, trunk, pad_id)) is None:
        return None
    model, name = made
    head = nn.Linear(weight.shape[1], 1, bias=False, device="meta")
    of_trunk = next(p.dtype for p in trunk.parameters() if p.is_floating_point())
    head.weight = nn.Parameter(weight.detach().to(of_trunk, copy=True), requires_grad=False)
    setattr(model, model.base_model_prefix, trunk)
    setattr(model, name, head)
    model.eval()
    return model if _reads_last_token(model, trunk, head) else None


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


def read_scale(config: "PreTrainedConfig") -> dict[str, float] | None:
    """The offset, mean and std of a reward model that was written here; None for any other.

    Raises SurefootError if they are not finite numbers.
    """
    scale = getattr(config, SCALE, None)
    if scale is None:
        return None
    names = ("offset", "mean", "std")
    if not isinstance(scale, dict) or not all(isinstance(scale.get(name), (int, float)) for name in names):
        raise SurefootError(f"config.json: {SCALE}={scale!r}: must have the numbers {', '.join(names)}; copy the whole folder")
    if bad := [name for name in names if not math.isfinite(scale[name])]:
        raise SurefootError(f"config.json: {SCALE}.{bad[0]}={scale[bad[0]]}: is not finite; copy the whole folder")
    return {name: float(scale[name]) for name in names}


def head_record(head: nn.Linear) -> str:
    """The head for config.json, as base64 of its weight and bias in float32.

    The written weight is divided by std, which rounds it. With this record, a run reads the head as it was trained.
    """
    numbers = torch.cat([head.weight.detach().flatten(), head.bias.detach()]).to("cpu", torch.float32)
    return base64.b64encode(numbers.numpy().astype("<f4").tobytes()).decode()


def read_head_record(config: "PreTrainedConfig") -> tuple[Tensor, Tensor] | None:
    """Weight and bias of the head before scaling; None for a folder without a record of them.   [1, width], [1]

    Raises SurefootError if the record is damaged.
    """
    text = (getattr(config, SCALE, None) or {}).get("head")
    if text is None:
        return None
    try:
        numbers = torch.from_numpy(np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float32))
    except (binascii.Error, TypeError, ValueError) as error:
        raise SurefootError(f"config.json: {SCALE}.head: can't be read ({error}); copy the whole folder") from None
    return numbers[:-1].unsqueeze(0), numbers[-1:]


def saved_head(folder: Path) -> Tensor:
    """The weight of the head in a folder that was written here; of a token classifier that of the good label.   [1, width]"""
    index = folder / "model.safetensors.index.json"
    names = set(read_table(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    for name in sorted(names):
        with open_tensors(folder / name) as tensors:
            for key in tensors.keys():  # noqa: SIM118 (it is no dict)
                if key.count(".") == 1 and key.endswith(".weight") and tensors.get_slice(key).get_shape()[0] in (1, 2):
                    weight: Tensor = tensors.get_tensor(key)
                    return weight[-1:]
    raise SurefootError(f"{folder}: has no head; copy the whole folder")
