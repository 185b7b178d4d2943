"""Folders and hub ids of ``transformers``, read strictly: whole, of the right kind, every weight in its place, or one line.

Left alone, ``from_pretrained`` fills weights that are missing with random numbers and drops those that are too many.
"""

import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from surefoot.errors import SurefootError, cause_of, did_you_mean
from surefoot.files import read_table
from surefoot.language.optional import quiet
from surefoot.runs.checkpoint import flush, replace_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
HEAD = "head.safetensors"
"""the scalar head of a reward model, beside its backbone"""
CAUSAL = "give a causal language model, one that AutoModelForCausalLM of transformers loads"


def read_config(name: str, trust_remote_code: bool = False) -> "PreTrainedConfig":
    """The configuration of a model folder or hub id, with every dropout at 0.

    Raises SurefootError when there is no such folder, it lacks a part, or the hub does not answer.
    """
    from transformers import AutoConfig

    if is_folder(name):
        check_parts(Path(name))
    config: PreTrainedConfig
    with quiet():
        try:
            config = _from_here_first(AutoConfig, name, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise _refused(name, error) from None
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
    with quiet():
        try:
            model, report = _from_here_first(
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
            raise _refused(name, error) from None
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

    with quiet():
        try:
            found: PreTrainedTokenizerBase = _from_here_first(AutoTokenizer, name, trust_remote_code=trust_remote_code)
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
def written_whole(folder: Path, known_by: str = "config.json") -> Iterator[Path]:
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
        with quiet():
            yield temporary
        for path in sorted(temporary.rglob("*")):
            flush(path)
        flush(temporary)
        replace_folder(temporary, folder)
    except OSError as error:
        raise SurefootError(f"{folder}: the model is not saved ({error.strerror or error}); choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _from_here_first(auto: Any, name: str, **options: Any) -> Any:
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
        raise _unreachable(name)
    address = urlsplit(constants.ENDPOINT)
    if getproxies().get(address.scheme):  # then the proxy knows the address
        return
    try:
        socket.getaddrinfo(address.hostname, None)
    except OSError:
        raise _unreachable(name) from None


def _unreachable(name: str) -> SurefootError:
    return SurefootError(
        f"model={name!r}: no such folder here, and the hub can't be reached{did_you_mean(name, _around())}; "
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
    own = {_numberless(key) for key in model.state_dict()}
    extra = sorted(key for key in report["unexpected_keys"] if _numberless(key) in own)
    for keys, what in ((sorted(report["missing_keys"]), "lack"), (extra, "have, beyond what config.json describes,")):
        if keys:
            others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise SurefootError(f"model={name!r}: its weights {what} {keys[0]}{others}; copy both from the same place")


def _numberless(key: str) -> str:
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


def _refused(name: str, error: Exception) -> SurefootError:
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
        return _unreachable(name)
    return SurefootError(f"model={name!r}: no such folder here, and the hub refuses it ({cause_of(error)})")


def _around() -> Sequence[str]:
    return ["pocket", *(path.name for path in Path.cwd().iterdir() if path.is_dir())]
