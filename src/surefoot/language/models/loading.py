"""Load and save causal language models; read folders and hub ids of ``transformers`` strictly."""

import re
import shutil
import socket
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError, cause_of, did_you_mean
from surefoot.files import read_table
from surefoot.language.adapters.layers import merged_state
from surefoot.language.extras import quiet_transformers, require_transformers
from surefoot.runs.checkpoint import flush, replace_folder

if TYPE_CHECKING:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
    )

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
HEAD = "head.safetensors"
"""the scalar head of a reward model, beside its backbone"""
CAUSAL = "give a causal language model, one that AutoModelForCausalLM of transformers loads"


def load_model(
    name: str | Path, *, seed: int = 1, trust_remote_code: bool = False
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """A causal language model and its tokenizer, in float32, without dropout, in eval mode.

    name                a folder written by ``save_pretrained``, a hub id, or ``pocket``, which is made anew from the seed
    trust_remote_code   let a model's own code run; without it such a model is refused

    Raises SurefootError when there is no such model, a part of it is missing, it is of another kind, its weights or its
    tokenizer don't fit its configuration, or ``transformers`` is not installed.
    """
    name = str(name)
    require_transformers(f"model={name!r}")
    if name == "pocket":
        return pocket(seed=seed)
    from transformers import AutoModelForCausalLM

    name = str(Path(name).expanduser()) if is_folder(name) else name
    config = read_config(name, trust_remote_code)
    check_causal(name, config, trust_remote_code)
    model = read_weights(AutoModelForCausalLM, name, config, trust_remote_code)
    tokenizer = read_tokenizer(name, trust_remote_code)
    check_vocabulary(name, model, tokenizer)
    if looks_ahead(model):
        raise SurefootError(f"model={name!r}: {NOT_CAUSAL} ({type(model).__name__}); {CAUSAL}")
    return model, tokenizer


def load_config(name: str | Path, *, trust_remote_code: bool = False) -> "PreTrainedConfig":
    """The configuration of what ``load_model`` would load, and nothing of its weights.

    Raises SurefootError when there is no such model, or a part of it is missing.
    """
    require_transformers(f"model={str(name)!r}")
    if str(name) == "pocket":
        return pocket_config()
    name = str(Path(name).expanduser()) if is_folder(str(name)) else str(name)
    return read_config(name, trust_remote_code)


def save_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: str | Path) -> None:
    """Write a model folder, whole or not at all; an older model there is replaced.

    Raises SurefootError when the folder holds something else, or the disk refuses.
    """
    with atomic_folder(Path(folder)) as temporary:
        model.save_pretrained(temporary, state_dict=merged_state(model))
        tokenizer.save_pretrained(temporary)


def context_length(model: "PreTrainedModel") -> int | None:
    """How many tokens the model was made for; None where its configuration does not say."""
    config = model.config.get_text_config()
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return int(length) if length else None


def read_config(name: str, trust_remote_code: bool = False) -> "PreTrainedConfig":
    """The configuration of a model folder or hub id, with every dropout at 0.

    Raises SurefootError when there is no such folder, it lacks a part, or the hub does not answer.
    """
    from transformers import AutoConfig

    if is_folder(name):
        check_parts(Path(name))
    config: PreTrainedConfig
    with quiet_transformers():
        try:
            config = _local_first(AutoConfig, name, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise _load_error(name, error) from None
    no_dropout(config)
    return config


def read_only_config(place: Path) -> "PreTrainedConfig":
    """The configuration in a file, or in a folder whatever else is there, with every dropout at 0. Raises what ``transformers``
    does.
    """
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(place, local_files_only=True)
    no_dropout(config)
    return config


def read_weights(auto: Any, name: str, config: "PreTrainedConfig", trust_remote_code: bool = False) -> "PreTrainedModel":
    """A model by one of the Auto classes, in float32 and eval mode, without dropout; every weight is the file's.

    Raises SurefootError when the weights can't be read or are not those of the configuration.
    """
    with quiet_transformers():
        try:
            model, report = _local_first(
                auto,
                name,
                config=config,
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,  # they are in the report
                output_loading_info=True,
                adapter_kwargs={"local_files_only": True},  # where peft is installed, transformers asks the hub for adapters
            )
        except Exception as error:
            raise _load_error(name, error) from None
    _check_report(name, model, report)
    for module in model.modules():
        no_dropout(module)
    _make_writable(model)
    model.eval()
    found: PreTrainedModel = model
    return found


def read_tokenizer(name: str, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder or hub id.

    Raises SurefootError when it can't be read.
    """
    from transformers import AutoTokenizer

    with quiet_transformers():
        try:
            found: PreTrainedTokenizerBase = _local_first(AutoTokenizer, name, trust_remote_code=trust_remote_code)
        except SurefootError:
            raise
        except Exception as error:
            raise SurefootError(
                f"model={name!r}: its tokenizer can't be read ({cause_of(error)}); copy the whole folder"
            ) from None
    return found


def check_vocabulary(name: str, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise SurefootError when the tokenizer has ids that the model has no embedding for. Fewer is common, and fine."""
    table = model.get_input_embeddings().weight
    assert isinstance(table, torch.Tensor)
    rows = table.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise SurefootError(
            f"model={name!r}: the tokenizer's ids go up to {largest} and the model has embeddings for {rows} tokens; "
            "they don't belong together: take the tokenizer from where the model is from"
        )


def check_causal(name: str, config: "PreTrainedConfig", trust_remote_code: bool = False) -> None:
    """Raise SurefootError when a configuration is that of another kind of model, such as a classifier."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    architectures = config.architectures or []
    if is_folder(name) and (Path(name) / HEAD).is_file():
        raise SurefootError(f"model={name!r}: is a reward model ({HEAD}), which writes no text; {CAUSAL}")
    if config.model_type not in KNOWN or (architectures and not set(architectures) & set(KNOWN.values())):
        kind = ", ".join(architectures) or config.model_type or "model without a type"
        raise SurefootError(f"model={name!r}: is of another kind ({kind}); {CAUSAL}")


def is_folder(name: str) -> bool:
    """Whether a model's name is a folder here.

    Raises SurefootError for a file, and for what can only be meant as a folder and isn't there.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return True
    if path.exists():
        raise SurefootError(f"model={name!r}: is a file; a model is a folder that save_pretrained wrote, or a hub id")
    first = path.parts[0] if path.parts else ""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith(".") or (len(path.parts) > 1 and Path(first).is_dir()):
        beside = [str(found) for found in path.parent.iterdir() if found.is_dir()] if path.parent.is_dir() else []
        raise SurefootError(
            f"model={name!r}: no such folder{did_you_mean(name, beside)}; give one that save_pretrained wrote, a run, a hub "
            "id, or 'pocket', the model that is built in"
        )
    return False


def check_parts(folder: Path) -> None:
    """Raise SurefootError when a model folder lacks its configuration, its weights, a shard of them, or its tokenizer."""
    name = str(folder)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise SurefootError(f"model={name!r}: holds an adapter and no model; merge it into its base model first")
    if not (folder / "config.json").is_file():
        raise SurefootError(f"model={name!r}: has no config.json; a model is a folder that save_pretrained wrote")
    weights = next((folder / file for file in WEIGHTS if (folder / file).is_file()), None)
    if weights is None:
        raise SurefootError(f"model={name!r}: has no weights ({WEIGHTS[0]}); copy the whole folder")
    if weights.name.endswith(".index.json"):
        try:
            shards = sorted(set(read_table(weights)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SurefootError(
                f"model={name!r}: {weights.name} can't be read ({cause_of(error)}); copy the whole folder"
            ) from None
        for shard in shards:
            if not (folder / shard).is_file():
                raise SurefootError(f"model={name!r}: {shard} is missing, which {weights.name} lists; copy the whole folder")
    if not any((folder / file).is_file() for file in TOKENIZERS):
        raise SurefootError(f"model={name!r}: has no tokenizer ({TOKENIZERS[0]}); copy the whole folder")


def no_dropout(holder: "PreTrainedConfig | nn.Module") -> None:
    """Set every probability of dropping something to 0: in a configuration and those nested in it, or in one module."""
    for key, value in list(vars(holder).items()):
        if "drop" in key and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(holder, key, 0.0)
        elif hasattr(value, "model_type") and hasattr(value, "to_dict") and not isinstance(holder, nn.Module):
            no_dropout(value)
    if isinstance(holder, nn.modules.dropout._DropoutNd):
        holder.p = 0.0


@contextmanager
def atomic_folder(folder: Path, known_by: str = "config.json") -> Iterator[Path]:
    """A temporary folder to write a model to, which takes its place in the end; on an error nothing has changed. An older one
    is replaced, which is known by a file.

    Raises SurefootError when the place holds something that is not a model, or the disk refuses.
    """
    folder = folder.expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / known_by).is_file())):
        raise SurefootError(f"{folder}: holds something that is not a model; choose an empty folder")
    temporary = folder.with_name(f".{folder.name}.{getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        with quiet_transformers():
            yield temporary
        for path in sorted(temporary.rglob("*")):
            flush(path)
        flush(temporary)
        replace_folder(temporary, folder)
    except OSError as error:
        raise SurefootError(f"{folder}: the model is not saved ({error.strerror or error}); choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _local_first(auto: Any, name: str, **options: Any) -> Any:
    """From the folder, or what was downloaded before; the hub is asked only for what is not here, and that can take long."""
    try:
        return auto.from_pretrained(name, local_files_only=True, **options)
    except OSError:
        if is_folder(name):
            raise
    _check_hub(name)
    return auto.from_pretrained(name, **options)


def _check_hub(name: str) -> None:
    """Raise SurefootError when the hub has no address here: asking it would try again and again, for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise _hub_unreachable(name)
    address = urlsplit(constants.ENDPOINT)
    if getproxies().get(address.scheme):  # then the proxy knows the address
        return
    try:
        socket.getaddrinfo(address.hostname, None)
    except OSError:
        raise _hub_unreachable(name) from None


def _hub_unreachable(name: str) -> SurefootError:
    return SurefootError(
        f"model={name!r}: no such folder here, and the hub can't be reached{did_you_mean(name, _local_names())}; "
        "give a folder, or 'pocket', the model that is built in"
    )


def _check_report(name: str, model: nn.Module, report: dict[str, Any]) -> None:
    """Raise SurefootError when weights were missing, of other shapes, or of layers that the configuration has not.

    Weights of something else (a value head, another task's) are let be: ``transformers`` knows no better either.
    """
    if report["mismatched_keys"]:
        key, found, wanted = sorted(report["mismatched_keys"])[0]
        raise SurefootError(
            f"model={name!r}: its weights don't fit config.json: {key} is {list(found)} and should be {list(wanted)}; "
            "copy both from the same place"
        )
    own = {_without_numbers(key) for key in model.state_dict()}
    extra = sorted(key for key in report["unexpected_keys"] if _without_numbers(key) in own)
    for keys, what in ((sorted(report["missing_keys"]), "lack"), (extra, "have, beyond what config.json describes,")):
        if keys:
            others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise SurefootError(f"model={name!r}: its weights {what} {keys[0]}{others}; copy both from the same place")


def _without_numbers(key: str) -> str:
    return re.sub(r"\d+", "#", key)


def _make_writable(model: Any) -> None:
    """Let ``save_pretrained`` write this model again: it refuses sampling settings without the flag that uses them."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True


def _load_error(name: str, error: Exception) -> SurefootError:
    """One line for whatever ``from_pretrained`` raised."""
    if isinstance(error, SurefootError):
        return error
    text = str(error)
    if "trust_remote_code" in text:
        return SurefootError(
            f"model={name!r}: needs program code that comes with it, which is not run; read it, "
            "and set trust_remote_code = true if you trust it"
        )
    if is_folder(name):
        return SurefootError(f"model={name!r}: can't be read ({cause_of(error)}); copy the whole folder again")
    if any(words in text for words in ("connect", "offline", "resolve", "timed out", "local_files_only", "cached")):
        return _hub_unreachable(name)
    return SurefootError(f"model={name!r}: no such folder here, and the hub refuses it ({cause_of(error)})")


def _local_names() -> Sequence[str]:
    return ["pocket", *(path.name for path in Path.cwd().iterdir() if path.is_dir())]


NOT_CAUSAL = "its logits depend on later tokens, as those of an encoder do"


@torch.no_grad()
def looks_ahead(model: Any) -> bool:
    """Whether what a model says after four tokens changes when four more follow: then it is not causal.

    Tried and not believed, because ``transformers`` makes a causal class of a BERT too, and only warns. In eval mode.
    """
    embeddings = model.get_input_embeddings().weight
    ids = (torch.arange(8, device=embeddings.device) * 7 % embeddings.shape[0]).unsqueeze(0)
    with quiet_transformers():
        short, long = (model(input_ids=part, use_cache=False).logits[:, :4] for part in (ids[:, :4], ids))
    told = short.isfinite() & long.isfinite()  # weights that have diverged are told of where they are used
    return bool(told.any()) and not logits_close(short[told], long[told])


def logits_close(a: Tensor, b: Tensor) -> bool:
    """Equal up to the rounding of the model's own dtype."""
    rounding = 1e-3 if a.dtype in (torch.float32, torch.float64) else 3e-2
    return a.shape == b.shape and bool((a - b).abs().max() <= rounding * b.abs().max())


ALPHABET = "".join(character for character in string.printable if character.isprintable()) + "\n"
"""printable ASCII, and the end of a line"""
PAD, EOS, UNK = "⟨pad⟩", "⟨eos⟩", "⟨unk⟩"
ROLES = ("system", "user", "assistant")
SPECIALS = (PAD, EOS, UNK, *(f"⟨{role}⟩" for role in ROLES))
"""not in ASCII, so that no text of the alphabet can spell one"""
WIDTH, LAYERS, HEADS, FEED_FORWARD, CONTEXT = 128, 4, 4, 352, 1024
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the roles are system, user and assistant') }}{% endif %}"
    "{{ '⟨' + message['role'] + '⟩' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '⟨assistant⟩' }}{% endif %}"
)


def pocket(alphabet: str = ALPHABET, seed: int = 1) -> "tuple[LlamaForCausalLM, PreTrainedTokenizerFast]":
    """A new model and its tokenizer: one token per character of the alphabet, weights from the seed alone.

    About 0.8 M parameters: width 128, 4 layers, 4 heads, feed-forward 352, context 1024. Text of the alphabet is decoded to
    itself; other characters become ⟨unk⟩. Pad, EOS and unk are three tokens; there is no BOS. Needs the extra ``language``.

    Raises SurefootError when the alphabet is empty or holds a character twice.
    """
    require_transformers("model='pocket'")
    from transformers import LlamaForCausalLM

    tokenizer = character_tokenizer(alphabet)
    config = pocket_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "pocket"))
        model = LlamaForCausalLM(config)
    return model.eval(), tokenizer


def pocket_config(tokenizer: "PreTrainedTokenizerFast | None" = None) -> "LlamaConfig":
    """The model's configuration, for its own tokenizer if no other is given."""
    from transformers import LlamaConfig

    tokenizer = tokenizer or character_tokenizer()
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=FEED_FORWARD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def character_tokenizer(alphabet: str = ALPHABET, context: int = CONTEXT) -> "PreTrainedTokenizerFast":
    """One token per character, after the special ones.

    Raises SurefootError when the alphabet is empty, or holds a character twice.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not alphabet or len(set(alphabet)) < len(alphabet):
        raise SurefootError(f"alphabet={alphabet!r}: must hold at least one character, and each once")
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *alphabet))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        extra_special_tokens=list(SPECIALS[3:]),
        chat_template=TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
