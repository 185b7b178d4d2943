"""Data sets of the Hugging Face hub by name: ``hf://org/name/config@revision:split``, downloaded by ``datasets``."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from surefoot.errors import SurefootError, cause_of, did_you_mean, require_package
from surefoot.files import cache_folder, read_text, write_text
from surefoot.language.data.rows import Row
from surefoot.language.data.sources.formats import BATCH, without_schema_nulls
from surefoot.store.hub import COMMIT, HubName, parse_name, why_unreachable
from surefoot.terminal import is_terminal

FORM = "write hf://org/name:split, or hf://org/name/config@revision:split"


def parse_data(text: str | Path) -> HubName:
    """The parts of a data set's name. Raises SurefootError for another form."""
    return parse_name(text, "a data set", FORM)


def pinned(text: str) -> str:
    """The name with the commit that its revision means now, so that later runs read the same rows.

    Without the hub, the commit that was downloaded last.

    Raises SurefootError if the data set or revision doesn't exist, or is in no cache while the hub can't be reached.
    """
    name = parse_data(text)
    if name.revision and COMMIT.fullmatch(name.revision):
        return str(name)
    require_package("datasets", "data", f"{text}: reading the hub")
    with _errors(text):
        return str(replace(name, revision=_commit(name)))


def hub_rows(text: str) -> Iterator[Row]:
    """The rows of a split. ``datasets`` downloads and converts them once; they are read from its memory-mapped files."""
    name = parse_data(text)
    dataset = _load(text, name)
    number = 0
    with _errors(text):
        for batch in dataset.iter(BATCH):
            for values in zip(*batch.values(), strict=True):
                number += 1
                columns = without_schema_nulls(dict(zip(batch, values, strict=True)))
                yield Row(columns, f"{name}, row {number}", str(name))


def hub_size(text: str) -> int:
    """The bytes of a split's rows. Raises SurefootError as ``hub_rows`` does."""
    return int(_load(text, parse_data(text)).data.nbytes)


def _load(text: str, name: HubName) -> Any:
    """The split as a ``datasets.Dataset``."""
    require_package("datasets", "data", f"{text}: reading the hub")
    with _errors(text), _quiet():
        builder = _builder(text, replace(name, revision=_commit(name)))
        builder.download_and_prepare()
        splits = list(builder.info.splits or {})
        split = name.split or (splits[0] if len(splits) == 1 else None)
        if split is None:
            raise SurefootError(f"{text}: has the splits {', '.join(splits)}; name one, as in {name}:{splits[0]}")
        base = split.partition("[")[0]
        if base not in splits and "+" not in split:
            near = did_you_mean(base, splits)
            raise SurefootError(f"{text}: has no split {base!r}{near}; its splits: {', '.join(splits)}")
        return builder.as_dataset(split=split)


def _builder(text: str, name: HubName) -> Any:
    """What loads the commit. Without the hub: from the cache, if that commit is in it.

    Offline, ``datasets`` loads the commit that was downloaded last, whichever the revision is; hence the check.
    """
    from datasets import load_dataset_builder

    failure: Exception | None = None
    try:
        builder = load_dataset_builder(name.name, name.config, revision=name.revision)
        if builder.hash == name.revision:
            return builder
    except Exception as error:  # of the network, or a config that is not there
        failure = error
    cached = _cached(name)
    if cached is not None:
        return cached
    if failure is not None and not isinstance(failure, OSError):
        raise failure
    raise SurefootError(f"{text}: this revision is not in the cache and the hub can't be reached; connect to the network once")


def _cached(name: HubName) -> Any:
    """A builder of the commit in the cache of ``datasets``; None if it is not there."""
    from datasets import config as settings
    from datasets.packaged_modules.cache.cache import Cache

    root = Path(settings.HF_DATASETS_CACHE) / name.name.replace("/", "___")
    folders = sorted(root.glob(f"{name.config or '*'}/*/{name.revision}"))
    folders = [folder for folder in folders if folder.is_dir()]
    if name.config is None and len(folders) > 1:
        folders = [folder for folder in folders if folder.parts[-3] == "default"]
    if len(folders) != 1:
        return None
    config, version, commit = folders[0].parts[-3:]
    dataset = name.name.rpartition("/")[2]
    return Cache(dataset_name=dataset, repo_id=name.name, config_name=config, version=version, hash=commit)


def _commit(name: HubName) -> str:
    """The commit of a revision: by the hub, or else as it was when the hub was reached last."""
    if name.revision and COMMIT.fullmatch(name.revision):
        return name.revision
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HfHubHTTPError

    revision = name.revision or "main"
    own = cache_folder("hub") / quote(f"{name.name}@{revision}", safe="")
    try:
        commit = str(HfApi().dataset_info(name.name, revision=name.revision, timeout=30).sha)
        with suppress(OSError):
            own.parent.mkdir(parents=True, exist_ok=True)
            write_text(own, commit)
        return commit
    except HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise
        reason: Exception = error
    except Exception as error:  # of the network, of several libraries
        reason = error
    theirs = Path(HF_HUB_CACHE) / f"datasets--{name.name.replace('/', '--')}" / "refs" / revision
    for ref in (own, theirs):
        if ref.is_file() and COMMIT.fullmatch(commit := read_text(ref).strip()):
            return commit
    raise SurefootError(f"{name}: {why_unreachable(reason)}")


@contextmanager
def _errors(text: str) -> Iterator[None]:
    """Turn any error of ``datasets`` into one line."""
    try:
        yield
    except SurefootError:
        raise
    except Exception as error:
        raise SurefootError(f"{text}: can't be read from the hub ({cause_of(error)}); check the name: {FORM}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence logs of ``datasets``; show its progress bars in a terminal alone."""
    import datasets
    from datasets.utils import logging

    level, bars = logging.get_verbosity(), datasets.are_progress_bars_disabled()
    logging.set_verbosity(logging.CRITICAL)
    if not is_terminal(sys.stderr):
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()
