"""Agents and models on the Hugging Face hub: names, downloads and uploads.

A repository is the folder of a run without what resuming needs: recipe, metrics, samples, and either the agent in ``best/`` or
the model in the files of ``transformers``. ``surefoot.json`` lists the files with size and SHA-256. Only listed files and the
card are downloaded, and compared with the list; pickles and code are rejected, whoever wrote the repository.
"""

import importlib
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from surefoot import __version__
from surefoot.errors import SurefootError, cause_of, require_package
from surefoot.files import copy_file, read_table, write_text
from surefoot.store.manifest import FORMAT, LISTING, atomic_folder, fault_of_file, fingerprint, listed_files
from surefoot.terminal import is_terminal

# What reads and writes checkpoints is imported where it is used: it loads torch, and names of rows on the hub need none.

PREFIX = re.compile(r"hf:/{1,2}")  # a pathlib.Path has one slash
NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(/(?P<config>[^/@:]+))?(@(?P<revision>[^:]+))?(:(?P<split>.+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
FORM = "write hf://org/name, or hf://org/name@revision"
CARD = "README.md"
FILE = re.compile(r"[\w+=-][\w.+=-]*(/[\w+=-][\w.+=-]*)*")
"""names of files: relative, without hidden folders and characters of patterns"""
SUFFIXES = {".json", ".jsonl", ".toml", ".safetensors", ".txt", ".jinja", ".model", ".png", ".mp4"}
"""endings of files that a repository may list: data, never code"""
PICKLES = {".bin", ".ckpt", ".dill", ".joblib", ".pickle", ".pkl", ".pt", ".pth"}
OWN = {".gitattributes", CARD, "LICENSE", "LICENSE.md", "LICENSE.txt"}
"""files that the hub or its users write, beside the listed ones"""
SECONDS = 30.0
"""a request for a repository's description may take"""


@dataclass(frozen=True)
class HubName:
    """The parts of a name; None for those left out. Agents and models have only a name and a revision."""

    name: str
    config: str | None = None
    revision: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        config, revision, split = (
            f"{mark}{part}" if part else "" for mark, part in (("/", self.config), ("@", self.revision), (":", self.split))
        )
        return f"hf://{self.name}{config}{revision}{split}"


def is_hub_name(path: str | Path) -> bool:
    """Whether a path is a name on the hub."""
    return PREFIX.match(str(path)) is not None


def parse_name(text: str | Path, what: str = "an agent or model", form: str = FORM, alone: bool = False) -> HubName:
    """The parts of a name; ``alone`` allows only a name and a revision. Raises SurefootError for another form."""
    match = NAME.fullmatch(PREFIX.sub("", str(text), count=1))
    if match is None or (alone and (match["config"] or match["split"])):
        raise SurefootError(f"{PREFIX.sub('hf://', str(text), count=1)}: is not the name of {what} on the hub; {form}")
    return HubName(match["name"], match["config"], match["revision"], match["split"])


def parse_repository(text: str | Path, revision: str | None = None) -> HubName:
    """The name and revision of an agent or model; ``revision`` instead of one in the text.

    Raises SurefootError for the name of a data set, and for two revisions.
    """
    name = parse_name(text, alone=True)
    if revision is not None and name.revision is not None:
        raise SurefootError(f"--revision {revision}: {text} has a revision already; give one of the two")
    return HubName(name.name, revision=revision or name.revision)


def local_folder(path: str | Path) -> Path:
    """The folder of a name on the hub, downloaded if necessary; any other path as it is."""
    return fetch(parse_repository(path)) if is_hub_name(path) else Path(path)


def pinned(text: str) -> str:
    """The name with the commit that its revision means now."""
    name = parse_repository(text)
    return str(HubName(name.name, revision=fetch(name).name))


# ---- the list of files ------------------------------------------------------------------------------------------------


def write_listing(folder: Path, kind: str, steps: int) -> None:
    """Write ``surefoot.json`` for the files in a folder, with the kind of recipe and the steps of the checkpoint.

    The card is not listed, because it is edited on the hub; its hash shows whether it was edited here.

    Raises SurefootError for a file that no repository may hold.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name not in (LISTING, CARD)]
    for name in names:
        _check_name(name, str(folder))
    files = {name: fingerprint(folder / name) for name in names}
    card = fingerprint(folder / CARD) if (folder / CARD).is_file() else None
    table = {"format": FORMAT, "surefoot": __version__, "kind": kind, "steps": steps, "card": card, "files": files}
    write_text(folder / LISTING, json.dumps(table, indent=1))


def listed(listing: Path, where: str) -> dict[str, dict[str, Any]]:
    """The files of a ``surefoot.json`` with size and SHA-256; ``where`` begins the errors.

    Raises SurefootError for another format, and for a file that no repository may hold.
    """
    files = listed_files(listing, f"{where}: {LISTING}")
    for name in files:
        _check_name(name, where)
    return files


def check_files(folder: Path, where: str) -> None:
    """Raise SurefootError if a listed file is missing, differs, or is a pickle."""
    for name, expected in listed(folder / LISTING, where).items():
        if problem := fault_of_file(folder / name, expected):
            raise SurefootError(f"{where}: {name} {problem}; choose another revision, or ask who pushed it")


def _check_name(name: str, where: str) -> None:
    suffix = Path(name).suffix.lower()
    if suffix in PICKLES:
        raise SurefootError(f"{where}: contains a pickle ({name[:80]}), which is never read; choose another revision")
    if not FILE.fullmatch(name) or suffix not in SUFFIXES:
        raise SurefootError(
            f"{where}: lists {name[:80]!r}, which is not a file of an agent or model; don't use this repository"
        )


# ---- download ---------------------------------------------------------------------------------------------------------


def fetch(name: HubName) -> Path:
    """Download a repository into the cache of ``huggingface_hub``. The folder's name is the commit.

    Without the hub: the commit that was downloaded last, or the named one, if the cache has it.

    Raises SurefootError if there is no such repository or revision, if ``surefoot push`` did not write it, if it holds a
    pickle, or if a file differs from its hash.
    """
    where = str(name)
    with hub_errors(where):
        from huggingface_hub import snapshot_download

        listing, cached = _find_listing(name, where)
        files = listed(listing, where)
        wanted = [*files, LISTING, CARD]
        snapshot_download(name.name, revision=listing.parent.name, allow_patterns=wanted, local_files_only=cached)
    check_files(listing.parent, where)
    return listing.parent


def _find_listing(name: HubName, where: str) -> tuple[Path, bool]:
    """``surefoot.json`` of the repository, downloaded, and whether all else has to come from the cache too.

    The repository is looked up by one request that is not repeated: downloads repeat theirs for half a minute.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    failure: Exception | None = None
    network: tuple[type[Exception], ...] = (OSError, *_network_errors())
    try:
        repository = HfApi().model_info(name.name, revision=name.revision, timeout=SECONDS)
        names = [sibling.rfilename for sibling in repository.siblings or ()]
        if pickles := [file for file in names if Path(file).suffix.lower() in PICKLES]:
            _check_name(pickles[0], where)
    except HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise
        failure = error
    except network as error:
        failure = error
    try:
        listing = hf_hub_download(name.name, LISTING, revision=name.revision, local_files_only=failure is not None)
    except LocalEntryNotFoundError as error:
        raise SurefootError(f"{where}: {why_unreachable(failure or error)}") from None
    return Path(listing), failure is not None


def pull(name: HubName, folder: Path) -> str:
    """Copy a repository to a new folder, whole or not at all; its commit.

    Raises SurefootError if the folder holds anything, and as ``fetch`` does.
    """
    folder = Path(os.path.expanduser(folder)).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SurefootError(f"{folder}: exists already; choose another folder: surefoot pull {name.name} FOLDER")
    source = fetch(name)
    with atomic_folder(folder, LISTING, f"the copy of {name}") as temporary:
        for file in (*listed(source / LISTING, str(name)), LISTING, CARD):
            if (source / file).is_file():
                (temporary / file).parent.mkdir(parents=True, exist_ok=True)
                copy_file(source / file, temporary / file)
        check_files(temporary, str(name))
    return source.name


# ---- upload -----------------------------------------------------------------------------------------------------------


@contextmanager
def new_folder(place: Path | None) -> Iterator[Path]:
    """An empty folder to write a repository in: ``place``, whole or not at all, or a temporary one if that is None.

    Raises SurefootError if ``place`` holds anything but an older repository as it was written.
    """
    if place is None:
        with tempfile.TemporaryDirectory(prefix="surefoot-hub-") as made:
            yield Path(made)
        return
    if place.exists() and not (place / LISTING).is_file() and (not place.is_dir() or any(place.iterdir())):
        raise SurefootError(f"--out {place}: contains other files; choose a new folder")
    if (place / LISTING).is_file() and (edited := _not_as_written(place)):
        raise SurefootError(f"--out {place}: {edited} was edited or added; move the folder away, or choose a new one")
    with atomic_folder(place, LISTING, "a repository") as folder:
        yield folder


def _not_as_written(folder: Path) -> str | None:
    """The first file of a repository that is not as its listing has it; None if all are."""
    try:
        table = read_table(folder / LISTING)
        written = {CARD: table.get("card"), **table["files"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        return LISTING
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name == LISTING or (path.is_dir() and not path.is_symlink()) or (name == CARD and "card" not in table):
            continue
        try:
            same = path.is_file() and fingerprint(path) == written.get(name)
        except (OSError, SurefootError):
            same = False
        if not same:
            return name
    return None


@dataclass(frozen=True)
class Target:
    """A repository to upload to."""

    name: str
    """with the owner"""
    head: str | None
    """its newest commit; None if the repository does not exist yet"""
    stale: Sequence[str] = ()
    """files that an older upload listed"""


def find_target(name: str, public: bool) -> Target:
    """Look at the repository before anything is uploaded. A name without owner belongs to the owner of the token.

    Raises SurefootError without a token, if the repository is public and ``public`` is not set, and if it holds files that
    ``surefoot push`` did not write.
    """
    with hub_errors(name):
        from huggingface_hub import HfApi, get_token, hf_hub_download
        from huggingface_hub.errors import RepositoryNotFoundError

        if get_token() is None:
            raise SurefootError(f"{name}: there is no token to upload with; run: hf auth login, or set HF_TOKEN")
        api = HfApi()
        whole = name if "/" in name else f"{api.whoami()['name']}/{name}"
        try:
            info = api.model_info(whole, timeout=SECONDS)
        except RepositoryNotFoundError:
            return Target(whole, None)
        files = [sibling.rfilename for sibling in info.siblings or ()]
        if not info.private and not public:
            raise SurefootError(f"{whole}: is a public repository; add --public to upload there, or choose another name")
        if LISTING in files:
            listing = Path(hf_hub_download(whole, LISTING, revision=info.sha))
            return Target(whole, info.sha, [file for file in (*listed(listing, whole), CARD) if file in files])
        if others := sorted(set(files) - OWN):
            raise SurefootError(f"{whole}: contains {others[0]}, which surefoot push did not write; choose another name")
        return Target(whole, info.sha)


def push(folder: Path, target: Target, public: bool, message: str) -> str:
    """Upload a folder as one commit, which also removes what an older upload left; its commit.

    Raises SurefootError if the hub rejects it; then nothing has changed, except that an empty repository may exist.
    """
    check_files(folder, str(folder))
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with hub_errors(target.name):
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        api = HfApi()
        if target.head is None:
            api.create_repo(target.name, private=not public)
        operations: list[Any] = [
            *(CommitOperationAdd(file, folder / file) for file in files),
            *(CommitOperationDelete(file) for file in target.stale if file not in files),
        ]
        done = api.create_commit(target.name, operations, commit_message=message, parent_commit=target.head)
        return str(done.oid)


def card_header(title: str, fields: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """The metadata of a model card in YAML.

    fields   of ``ModelCardData``, such as ``pipeline_tag``; None for those left out
    results  of evaluations, with the fields of ``EvalResult``
    """
    with hub_errors(title):
        from huggingface_hub import EvalResult, ModelCardData

        measured = [EvalResult(**result) for result in results]
        return str(ModelCardData(**fields, model_name=title, eval_results=measured or None).to_yaml())


# ---- huggingface_hub --------------------------------------------------------------------------------------------------


@contextmanager
def hub_errors(where: str) -> Iterator[None]:
    """Turn any error of ``huggingface_hub`` into one line that begins with ``where``, and silence its logs.

    Raises SurefootError, naming the extra, if it is not installed.
    """
    require_package("huggingface_hub", "hub", f"{where}: the hub")
    try:
        with _quiet():
            yield
    except SurefootError:
        raise
    except Exception as error:
        raise SurefootError(f"{where}: {_meaning(error)}") from None


def _meaning(error: Exception) -> str:
    """What an error of ``huggingface_hub`` means, with the remedy."""
    from huggingface_hub import errors

    match error:
        case errors.RepositoryNotFoundError():
            return "no such repository on the hub, or your token can't read it; check the name, or run: hf auth login"
        case errors.RevisionNotFoundError():
            return "has no such revision; give a branch, a tag or a commit of it"
        case errors.LocalEntryNotFoundError():
            return why_unreachable(error)
        case errors.EntryNotFoundError():
            return f"has no {LISTING}, so surefoot push did not write it; name a model of transformers without hf://"
        case errors.HfHubHTTPError():
            status = error.response.status_code
            remedies = {401: "the token is not valid; run: hf auth login", 403: "give the token the right to write there"}
            return f"the hub answers with status {status} ({cause_of(error)}); {remedies.get(status, 'try again later')}"
    if isinstance(error, (ConnectionError, *_network_errors())):
        return why_unreachable(error)
    return f"can't be read from or written to the hub ({cause_of(error)}); check the name"


def _network_errors() -> tuple[type[Exception], ...]:
    """The exceptions of the HTTP client of ``huggingface_hub``, which has had two."""
    clients = [importlib.import_module(name) for name in ("httpx", "httpx2") if find_spec(name) is not None]
    return tuple(client.HTTPError for client in clients)


def why_unreachable(error: Exception) -> str:
    """Why something in neither the hub's reach nor the cache can't be read, with the remedy."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "is not in the cache, and HF_HUB_OFFLINE is set; unset it, or give a folder"
    return f"the hub can't be reached, and the cache lacks it ({cause_of(error)}); check the network and HF_ENDPOINT"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence logs and warnings, which name nothing that a user can change; show progress bars in a terminal alone."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    level, bars = logger.level, not are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    if bars and not is_terminal(sys.stderr):
        disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        if bars:
            enable_progress_bars()
