"""Load and save causal language models; read folders and hub ids of ``transformers`` strictly."""

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from surefoot.errors import SurefootError, cause_of, did_you_mean, require_package
from surefoot.files import RUNS, as_path, read_table
from surefoot.language import quiet_transformers
from surefoot.language.models.adapters import merged_state
from surefoot.language.models.pocket import pocket, pocket_config
from surefoot.language.models.quantised import has_quantised
from surefoot.store.checkpoint import non_finite_numbers
from surefoot.store.manifest import atomic_folder, check_folder
from surefoot.store.tensors import stored_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
HEAD = "head.safetensors"
"""the scalar head of a reward model, in the folder of its backbone"""
LARGEST_FILE = "5GB"
"""of weights; a single tensor may be larger"""
CAUSAL = "use a causal language model, one that AutoModelForCausalLM of transformers loads"


def load_model(
    name: str | Path, *, seed: int = 1, trust_remote_code: bool = False, as_stored: bool = False
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a causal language model and its tokenizer, in float32 and eval mode, without dropout.

    name                a folder written by ``save_pretrained``, a hub id, or ``pocket``, a small model created from the seed
    trust_remote_code   run the model's own code; otherwise such a model is rejected
    as_stored           as ``read_weights``

    Raises SurefootError if the model does not exist, lacks a part, is not causal, has weights or a tokenizer that don't fit its
    configuration, or if ``transformers`` is not installed.
    """
    name = str(name)
    require_package("transformers", "language", f"model={name!r}")
    if name == "pocket":
        return pocket(seed=seed)
    from transformers import AutoModelForCausalLM

    name = str(Path(name).expanduser()) if is_folder(name) else name
    config = read_config(name, trust_remote_code)
    check_causal(name, config, trust_remote_code)
    model = read_weights(AutoModelForCausalLM, name, config, trust_remote_code, as_stored)
    tokenizer = read_tokenizer(name, trust_remote_code)
    check_vocabulary(name, model, tokenizer)
    if looks_ahead(model):
        kind = type(model).__name__
        raise SurefootError(f"model={name!r}: its logits depend on later tokens, like an encoder's ({kind}); {CAUSAL}")
    return model, tokenizer


def load_config(name: str | Path, *, trust_remote_code: bool = False) -> "PreTrainedConfig":
    """The configuration of the model that ``load_model`` loads, without its weights.

    Raises SurefootError if the model does not exist or lacks a part.
    """
    require_package("transformers", "language", f"model={str(name)!r}")
    if str(name) == "pocket":
        return pocket_config()
    name = str(Path(name).expanduser()) if is_folder(str(name)) else str(name)
    return read_config(name, trust_remote_code)


def save_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: str | Path) -> None:
    """Write a model folder atomically; an older model there is replaced.

    Raises SurefootError if the folder contains something else, or if writing fails.
    """
    with new_model_folder(as_path(folder, "folder")) as temporary:
        write_weights(model, temporary)
        tokenizer.save_pretrained(temporary)


def write_weights(model: "PreTrainedModel", folder: Path) -> None:
    """Write a model with its adapter merged; above ``LARGEST_FILE`` in several files with an index, as on the hub."""
    model.save_pretrained(folder, state_dict=merged_state(model), max_shard_size=LARGEST_FILE)


def context_length(model: "PreTrainedModel") -> int | None:
    """The model's context in tokens; None if its configuration has none."""
    config = model.config.get_text_config()
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return int(length) if length else None


def read_config(name: str, trust_remote_code: bool = False) -> "PreTrainedConfig":
    """The configuration of a model folder or hub id, with every dropout at 0.

    Raises SurefootError if the folder does not exist or lacks a part, if the hub can't be reached, for a model that also reads
    images or sound, and for weights that are quantised: they can't be trained, nor merged with an adapter.
    """
    from transformers import AutoConfig

    if is_folder(name):
        check_folder(Path(name), f"model={name!r}")
        check_parts(Path(name))
    config: PreTrainedConfig
    with quiet_transformers():
        try:
            config = _local_first(AutoConfig, name, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise _load_error(name, error) from None
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            raise SurefootError(
                f"model={name!r}: has {part} in its config.json ({config.model_type}), and only text is trained; use a model "
                "of text alone"
            )
    if (saved := getattr(config, "quantization_config", None)) is not None:
        method = saved.get("quant_method") if isinstance(saved, Mapping) else getattr(saved, "quant_method", None)
        raise SurefootError(
            f"model={name!r}: its weights are quantised ({getattr(method, 'value', method)}); use the model that they were "
            "made from, and adapter.quantize = 'nf4' or 'int8' to have its base in 4 or 8 bits"
        )
    no_dropout(config)
    return config


def read_only_config(place: Path) -> "PreTrainedConfig":
    """The configuration in a file or folder, with every dropout at 0; other files are not checked. Raises the errors of
    ``transformers``.
    """
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(place, local_files_only=True)
    no_dropout(config)
    return config


def read_weights(
    auto: Any, name: str, config: "PreTrainedConfig", trust_remote_code: bool = False, as_stored: bool = False
) -> "PreTrainedModel":
    """Load a model by an Auto class, in float32 and eval mode, without dropout; every weight comes from the file.

    as_stored   keep weights that are stored in bfloat16 or float16 so: the files are then mapped into memory, not copied

    Raises SurefootError if the weights can't be read or don't fit the configuration.
    """
    dtype = stored_dtype(name) if as_stored else torch.float32
    model, report = _read_in(dtype, auto, name, config, trust_remote_code)
    if dtype != torch.float32 and any(x.is_floating_point() and x.dtype != torch.float32 for x in model.buffers()):
        del model  # buffers are computed in the model's dtype, and would be rounded
        model, report = _read_in(torch.float32, auto, name, config, trust_remote_code)
    _check_report(name, model, report)
    for module in model.modules():
        no_dropout(module)
    _make_writable(model)
    loaded: PreTrainedModel = model.eval()
    return loaded


def _read_in(dtype: torch.dtype, auto: Any, name: str, config: "PreTrainedConfig", trust_remote_code: bool) -> tuple[Any, Any]:
    with quiet_transformers():
        try:
            model, report = _local_first(
                auto,
                name,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,  # the report lists them
                output_loading_info=True,
                adapter_kwargs={"local_files_only": True},  # with peft installed, transformers looks for adapters on the hub
            )
        except Exception as error:
            raise _load_error(name, error) from None
    return model, report


def stored_dtype(name: str) -> torch.dtype:
    """The dtype of all weights in the safetensors files of a model folder or a cached hub id, if it is bfloat16 or float16;
    float32 for any other, or several.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(name) if is_folder(name) else Path(snapshot_download(name, local_files_only=True))
        index = folder / WEIGHTS[1]
        names = shards_in(index) if index.is_file() else [WEIGHTS[0]]
        tensors = [tensor for file in names for tensor in stored_tensors(folder / file).values()]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, HFValidationError, LocalEntryNotFoundError):
        return torch.float32  # loading has the message
    dtypes = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16} else torch.float32


def read_tokenizer(name: str, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder or hub id.

    Raises SurefootError if it can't be read.
    """
    from transformers import AutoTokenizer

    with quiet_transformers():
        try:
            tokenizer: PreTrainedTokenizerBase = _local_first(AutoTokenizer, name, trust_remote_code=trust_remote_code)
        except SurefootError:
            raise
        except Exception as error:
            raise SurefootError(
                f"model={name!r}: its tokenizer can't be read ({cause_of(error)}); copy the whole folder"
            ) from None
    return tokenizer


def check_vocabulary(name: str, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise SurefootError if the tokenizer has ids without an embedding. Fewer ids than embeddings are common, and fine."""
    table = model.get_input_embeddings().weight
    assert isinstance(table, torch.Tensor)
    rows = table.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise SurefootError(
            f"model={name!r}: the tokenizer's ids go up to {largest} and the model has embeddings for {rows} tokens; "
            "they don't belong together; copy the tokenizer of this model"
        )


def check_causal(name: str, config: "PreTrainedConfig", trust_remote_code: bool = False) -> None:
    """Raise SurefootError if the configuration is not of a causal language model, but for example of a classifier."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    architectures = config.architectures or []
    if is_folder(name) and (Path(name) / HEAD).is_file():
        raise SurefootError(f"model={name!r}: is a reward model ({HEAD}), which generates no text; {CAUSAL}")
    if config.model_type not in KNOWN or (architectures and not set(architectures) & set(KNOWN.values())):
        kind = ", ".join(architectures) or config.model_type or "model without a type"
        raise SurefootError(f"model={name!r}: is not causal ({kind}); {CAUSAL}")


def is_folder(name: str) -> bool:
    """Whether a model's name is a local folder.

    Raises SurefootError for a file, and for a name that can only be a folder but does not exist.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return True
    if path.exists():
        function = f", and a function in this file is {name}:NAME" if path.suffix == ".py" else ""
        raise SurefootError(f"model={name!r}: is a file; a model is a folder that save_pretrained wrote, or a hub id{function}")
    first = path.parts[0] if path.parts else ""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith(".") or (len(path.parts) > 1 and Path(first).is_dir()):
        folders = [str(other) for other in path.parent.iterdir() if other.is_dir()] if path.parent.is_dir() else []
        raise SurefootError(
            f"model={name!r}: no such folder{did_you_mean(name, folders)}; give one that save_pretrained wrote, a run, a hub "
            "id, or 'pocket', the built-in model"
        )
    return False


def check_parts(folder: Path) -> None:
    """Raise SurefootError if a model folder lacks its configuration, its weights, a shard of them, or its tokenizer."""
    name = str(folder)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise SurefootError(f"model={name!r}: contains only an adapter; merge it into its base model first")
    if not (folder / "config.json").is_file():
        raise SurefootError(f"model={name!r}: has no config.json; a model is a folder that save_pretrained wrote")
    weights = next((folder / file for file in WEIGHTS if (folder / file).is_file()), None)
    if weights is None:
        raise SurefootError(f"model={name!r}: has no weights ({WEIGHTS[0]}); copy the whole folder")
    if weights.name.endswith(".index.json"):
        try:
            shards = shards_in(weights)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SurefootError(
                f"model={name!r}: {weights.name} can't be read ({cause_of(error)}); copy the whole folder"
            ) from None
        for shard in shards:
            if not (folder / shard).is_file():
                raise SurefootError(f"model={name!r}: {shard} is missing, which {weights.name} lists; copy the whole folder")
    if not any((folder / file).is_file() for file in TOKENIZERS):
        raise SurefootError(f"model={name!r}: has no tokenizer ({TOKENIZERS[0]}); copy the whole folder")


def shards_in(index: Path) -> list[str]:
    """The files that the index of a model's weights names. Raises errors of any kind if it is damaged."""
    return sorted(set(read_table(index)["weight_map"].values()))


def no_dropout(holder: "PreTrainedConfig | nn.Module") -> None:
    """Set every dropout probability to 0, in a module or in a configuration and those nested in it."""
    for key, value in list(vars(holder).items()):
        if "drop" in key and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(holder, key, type(value)(0))
        elif hasattr(value, "model_type") and hasattr(value, "to_dict") and not isinstance(holder, nn.Module):
            no_dropout(value)
    if isinstance(holder, nn.modules.dropout._DropoutNd):
        holder.p = 0.0


@contextmanager
def new_model_folder(folder: Path, marker: str = "config.json") -> Iterator[Path]:
    """A temporary folder for a model's files that replaces ``folder`` at the end; ``transformers`` writes them silently.

    Raises SurefootError if the folder contains something that is not a model, or if writing fails.
    """
    with atomic_folder(folder, marker, "a model") as temporary, quiet_transformers():
        yield temporary


def _local_first(auto: Any, name: str, **options: Any) -> Any:
    """Load from the folder or the local cache; query the hub only for a missing model, because that can take long."""
    try:
        return auto.from_pretrained(name, local_files_only=True, **options)
    except OSError:
        if is_folder(name):
            raise
    _check_hub(name)
    return auto.from_pretrained(name, **options)


def _check_hub(name: str) -> None:
    """Raise SurefootError if the hub's address can't be resolved: requests would be retried for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise _hub_unreachable(name)
    address = urlsplit(constants.ENDPOINT)
    if getproxies().get(address.scheme):  # the proxy resolves the address
        return
    try:
        socket.getaddrinfo(address.hostname, None)
    except OSError:
        raise _hub_unreachable(name) from None


def _hub_unreachable(name: str) -> SurefootError:
    return SurefootError(
        f"model={name!r}: no such folder here, and the hub can't be reached{_similar(name)}; "
        "give a folder, or 'pocket', the built-in model"
    )


def _similar(name: str) -> str:
    """A clause with the run or the folder that may be meant by a name."""
    if (RUNS / name).is_dir():
        return f"; did you mean '{RUNS / name}'?"
    return did_you_mean(name, ["pocket", *(path.name for path in Path.cwd().iterdir() if path.is_dir())])


def _check_report(name: str, model: nn.Module, report: dict[str, Any]) -> None:
    """Raise SurefootError for weights that are missing, not finite, of other shapes, or of layers beyond the configuration.

    Unrelated weights (a value head, another task's head) are ignored, as in ``transformers``.
    """
    if report["mismatched_keys"]:
        key, actual, expected = sorted(report["mismatched_keys"])[0]
        raise SurefootError(
            f"model={name!r}: its weights don't fit config.json: {key} is {list(actual)} and should be {list(expected)}; "
            "copy both from the same place"
        )
    own = {_without_numbers(key) for key in model.state_dict()}
    extra = sorted(key for key in report["unexpected_keys"] if _without_numbers(key) in own)
    for keys, what in ((sorted(report["missing_keys"]), "lack"), (extra, "have, beyond what config.json describes,")):
        if keys:
            others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise SurefootError(f"model={name!r}: its weights {what} {keys[0]}{others}; copy both from the same place")
    for key, parameter in model.named_parameters():
        if bad := non_finite_numbers(parameter.detach()):
            raise SurefootError(f"model={name!r}: {key} has numbers that are {bad}; take another copy or checkpoint")


def _without_numbers(key: str) -> str:
    return re.sub(r"\d+", "#", key)


def _make_writable(model: Any) -> None:
    """Make the generation config valid: ``save_pretrained`` rejects sampling settings without ``do_sample``."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True


def _load_error(name: str, error: Exception) -> SurefootError:
    """The error of ``from_pretrained`` as one line."""
    if isinstance(error, SurefootError):
        return error
    text = str(error)
    if "trust_remote_code" in text:
        return SurefootError(
            f"model={name!r}: needs its own Python code, which is not run by default; read it, "
            "and set trust_remote_code = true if you trust it"
        )
    if is_folder(name):
        return SurefootError(f"model={name!r}: can't be read ({cause_of(error)}); copy the whole folder again")
    if any(words in text for words in ("connect", "offline", "resolve", "timed out", "local_files_only", "cached")):
        return _hub_unreachable(name)
    hint = _similar(name)
    return SurefootError(
        f"model={name!r}: no such folder here, and the hub rejects it ({cause_of(error)}){hint}; check the name"
    )


@torch.no_grad()
def looks_ahead(model: Any) -> bool:
    """Whether the logits of four tokens change if four more follow: then the model is not causal.

    Tested because ``transformers`` also offers a causal class for BERT, with only a warning. The model must be in eval mode.
    """
    embeddings = model.get_input_embeddings().weight
    ids = (torch.arange(8, device=embeddings.device) * 7 % embeddings.shape[0]).unsqueeze(0)
    with quiet_transformers():
        short, long = (model(input_ids=part, use_cache=False).logits[:, :4] for part in (ids[:, :4], ids))
    finite = short.isfinite() & long.isfinite()  # diverged weights are reported where they are used
    return bool(finite.any()) and not logits_close(short[finite], long[finite], exact=not has_quantised(model))


def logits_close(a: Tensor, b: Tensor, exact: bool = True) -> bool:
    """Equal up to the rounding of the model's dtype; not ``exact``: that of activations in 8 bits."""
    rounding = 1e-3 if exact and a.dtype in (torch.float32, torch.float64) else 3e-2
    return a.shape == b.shape and bool((a - b).abs().max() <= rounding * b.abs().max())
