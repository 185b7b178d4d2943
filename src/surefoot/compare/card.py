"""Write the repository of a run for the Hugging Face hub: model card, curves, recipe without places, and the agent or model.

What belongs to this machine stays here: folders in the recipe become file names, tracker settings are removed, and so is every
argument that ``store.public`` does not list as harmless. Every removal is reported. Logs of trackers, traces and the state of
the optimizer are never copied.
"""

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from surefoot import __version__
from surefoot.compare.plots import PANELS
from surefoot.compare.report import duration, matplotlib_installed, rendered, write_figures
from surefoot.compare.runs import SavedRun, read_run
from surefoot.compare.statistics import markdown_table, number
from surefoot.control.agent import Agent
from surefoot.errors import SurefootError, to_install
from surefoot.files import copy_file, read_text, read_toml, write_text
from surefoot.recipes.base import Recipe
from surefoot.recipes.control import ControlRecipe
from surefoot.recipes.reading import make_recipe, to_toml
from surefoot.runs import api
from surefoot.store.checkpoint import load_checkpoint
from surefoot.store.folder import chosen_checkpoint, output_file
from surefoot.store.hub import CARD, HubName, card_header, is_hub_name, parse_name, write_listing
from surefoot.store.manifest import MANIFEST
from surefoot.store.metrics import FILE
from surefoot.store.public import ENVIRONMENT, REMOVED, TOKEN, public_table
from surefoot.store.reading import FINGERPRINTS, samples_in
from surefoot.terminal import visible, visible_lines

if TYPE_CHECKING:
    from surefoot.control.evaluate import EvaluationResult

VIDEO = "replay.mp4"
"""the name under which the hub shows an agent's video"""
CURVES, SHOWN_CURVES = "curves", 4
SHOWN_SAMPLES, LONGEST_TEXT = 3, 600
"""samples in the card, and characters of each text"""
ESCAPED = re.compile(r"\\(?:[nrtbf]|u[0-9a-fA-F]{4})")
"""line breaks, tabs and letters in strings of JSON and TOML"""
TASKS = {"control": "reinforcement-learning", "reward": "text-classification"}
"""the hub's names of tasks; text-generation for all other kinds"""
METRICS = {"held_out_reward": "reward", "held_out_gold": "gold", "held_out_accuracy": "accuracy", "held_out_loss": "loss"}
"""metrics in the header of the card, and their types there"""


@dataclass(frozen=True)
class Options:
    """What a repository shows besides the agent or model."""

    checkpoint: str | None = None
    """best, last or a number of steps; None: the best, else the last"""
    episodes: int = 20
    """of an agent's greedy evaluation; 0: none"""
    seed: int = 0
    """of these episodes, and of the video"""
    film: bool = False
    """record an episode, if the run has no video of it"""
    samples: bool = True
    """publish the responses of the last evaluation"""
    license: str | None = None
    """the hub's name of a licence, such as apache-2.0"""
    verify: bool = False
    """execute the last iterations again, and say so in the card"""
    publish: Collection[str] = ()
    """names of arguments in the recipe that may be published although they are not known to be harmless"""


def write_repository(path: Path, folder: Path, name: str, options: Options) -> list[str]:
    """Write the repository of the run in ``path`` to an empty folder; return what was left out or changed, line by line.

    name   of the repository, for the card

    Raises SurefootError if the run has no metrics or no checkpoint, if the evaluation or the video fails, or if a file still
    names a folder of this machine.
    """
    run = read_run(path)
    checkpoint = chosen_checkpoint(path, options.checkpoint)
    recipe, notes = public_recipe(run.recipe, options.publish)
    card = Card(run, recipe, name, int(checkpoint.name), options.license)
    if options.verify:
        card.verified = _verified(path)
    result = api.load_result(load_checkpoint(checkpoint), checkpoint)
    if isinstance(result, Agent):
        if options.episodes:
            card.evaluation = api.evaluate(result, episodes=options.episodes, seed=options.seed)
        notes += _copy_video(path, checkpoint, result, folder, options)
        assert isinstance(recipe, type(result.recipe))
        result.recipe = recipe
        result.save(folder / "best" / checkpoint.name)
    else:
        notes += result.save(folder) or ()
        (folder / MANIFEST).unlink()  # the listing of the repository has these files too
    write_text(folder / "config.toml", to_toml(recipe))
    public = {key: run.environment[key] for key in ENVIRONMENT if key in run.environment}  # what results depend on
    write_text(folder / "environment.json", json.dumps(public, indent=1))
    for name in (FILE, FINGERPRINTS):
        if (path / name).is_file():
            copy_file(path / name, folder / name)
    for samples in samples_in(path / "samples")[-1:] if options.samples else ():
        (folder / "samples").mkdir()
        copy_file(samples, folder / "samples" / samples.name)
    if matplotlib_installed():
        write_figures([run], folder / CURVES, "png")
    else:
        notes.append(f"no curves: they need matplotlib; run: {to_install('plots')}")
    write_text(folder / CARD, card.text(folder, run.samples() if options.samples else None))
    write_listing(folder, recipe.kind, card.steps)
    check_no_places(folder, path)
    return notes


def _verified(path: Path) -> str:
    """What of a run repeats here. Raises SurefootError if it does not."""
    from surefoot.runs.verify import plan_of, verify

    plan = plan_of(path)
    if plan.ranks > 1:
        raise SurefootError(f"--verify: {path} was trained on {plan.ranks} ranks; run surefoot verify instead")
    done = verify(plan)
    if not done.passed:
        raise SurefootError(f"--verify: {path} does not repeat: {done.line}")
    made_on = plan.record.machine_of(plan.last).get("processor", "the same processor")
    return f"{done.line}, by `surefoot verify` on {made_on}, {date.today()}"


def _copy_video(path: Path, checkpoint: Path, agent: Agent, folder: Path, options: Options) -> list[str]:
    """Copy the newest video of the checkpoint that ``surefoot watch`` recorded, or record one."""
    pattern = output_file(path, checkpoint, agent.recipe.task, "videos", "-seed*.mp4")
    videos = sorted(pattern.parent.glob(pattern.name), key=lambda video: video.stat().st_mtime)
    if videos:
        copy_file(videos[-1], folder / VIDEO)
        return []
    if not options.film:
        return ["no video: add --film to record one"]
    from surefoot.control.video import record_video

    return [record_video(agent, folder / VIDEO, seed=options.seed).line().replace(str(folder / VIDEO), VIDEO)]


# ---- what belongs to this machine -------------------------------------------------------------------------------------


def public_recipe(recipe: Recipe, also: Collection[str] = ()) -> tuple[Recipe, list[str]]:
    """The recipe as it may be published, without tracker settings, and a line for every field that was changed.

    also   names of arguments that may be published, besides those of ``HARMLESS``
    """
    table = recipe.table
    notes = ["config.toml: has no trackers"] if table["trackers"] else []
    plain, changed = public_table({key: value for key, value in table.items() if key not in ("trackers", "tracking")}, also)
    for field, shown in changed.items():
        why = (
            f"to publish it, add --publish {field.rpartition('.')[2]}"
            if shown == REMOVED
            else "without what belongs to this machine"
        )
        notes.append(f"config.toml: {field} is {shown!r}, {why}")
    return make_recipe(plain), notes


def check_no_places(folder: Path, run: Path) -> None:
    """Raise SurefootError if a text file of the repository names the home folder, the run's folder, or has a token.

    The name of a short folder, such as /root, must be followed by a slash: it may be a word of a sample.
    """
    home, others = Path.home(), (Path.cwd(), run.resolve().parent)
    places = {place for place in (home, *others) if len(place.parts) > (1 if place == home else 2)}
    named = {}
    for place in places:
        written = "|".join(re.escape(text) for text in (str(place), json.dumps(str(place))[1:-1]))  # as text, and in JSON
        named[str(place)] = rf"(?<![\w.-])(?:{written})/" if len(place.parts) == 2 else rf"(?:{written})(?![\w.-])"
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".safetensors", ".png", ".mp4", ".model") or path.name in (FILE, "tokenizer.json") or path.is_dir():
            continue
        text = read_text(path, errors="replace")
        text = f"{text}\n{ESCAPED.sub(' ', text)}"
        name, remedy = path.relative_to(folder), "leave the samples out (--no-samples), or change the recipe"
        if named_place := next((place for place, pattern in sorted(named.items()) if re.search(pattern, text)), None):
            raise SurefootError(f"{name}: names the folder {named_place} of this machine; {remedy}")
        if TOKEN.search(text):
            raise SurefootError(f"{name}: has what looks like an access token; {remedy}")


# ---- the card ---------------------------------------------------------------------------------------------------------


@dataclass
class Card:
    """The model card of a run."""

    run: SavedRun
    recipe: Recipe
    """as it is published"""
    name: str
    """of the repository"""
    steps: int
    """of the checkpoint"""
    license: str | None
    evaluation: "EvaluationResult | None" = None
    verified: str = ""
    """what repeats, on which processor and when; empty: nobody tried"""

    def text(self, folder: Path, samples: tuple[int, list[dict[str, Any]]] | None) -> str:
        """The card in Markdown, with its header; ``folder`` has the video and the curves."""
        recipe, versions = self.recipe, self.run.environment.get("versions")
        named = ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, dict) else ""
        curves = [panel.name for panel in PANELS if (folder / CURVES / f"{panel.name}.png").is_file()]  # in a report's order
        return rendered(
            "card.md",
            header=self._header(),
            title=self.name.rpartition("/")[2],
            name=self.name,
            hub=HubName(self.name),
            what=self._introduction(),
            version=__version__,
            steps=self.steps,
            recipe=recipe,
            video=VIDEO if (folder / VIDEO).is_file() else "",
            results=self._results(),
            verified=self.verified,
            own_code=isinstance(recipe, ControlRecipe) and (":" in recipe.task or recipe.network.custom is not None),
            curves=curves[:SHOWN_CURVES],
            samples=(samples[0], samples[1][:SHOWN_SAMPLES]) if samples and samples[1] else None,
            fenced=_fenced,
            short=_short,
            toml=to_toml(recipe),
            versions=_plain(f"Python {self.run.environment.get('python', '?')}, {named or f'surefoot {__version__}'}."),
        )

    def _header(self) -> str:
        """The metadata of the hub in YAML."""
        language = not isinstance(self.recipe, ControlRecipe)
        kind = {"language": self.recipe.algorithm.lower(), "reward": "reward-model"}.get(self.recipe.kind, self.recipe.kind)
        tags = (
            ["surefoot", kind]
            if language
            else ["surefoot", "reinforcement-learning", self.recipe.algorithm, self.recipe.trained]
        )
        train = str(self.recipe.table.get("data", {}).get("train"))
        fields = {
            "library_name": "transformers" if language else "surefoot",
            "pipeline_tag": TASKS.get(self.recipe.kind, "text-generation"),
            "tags": tags,
            "license": self.license,
            "base_model": base_model(self.run.recipe) if language else None,
            "datasets": [parse_name(train).name] if is_hub_name(train) else None,
        }
        return card_header(self.name.rpartition("/")[2], fields, self._measured())

    def _measured(self) -> list[dict[str, Any]]:
        """The results as the hub's ``model-index`` has them."""
        task = TASKS.get(self.recipe.kind, "text-generation")
        if self.evaluation is not None:
            result, dataset = self.evaluation, self.recipe.trained
            metric = {"metric_type": "mean_reward", "metric_value": f"{result.mean_return:.2f} +/- {result.std_return:.2f}"}
            arguments = {"episodes": result.episodes, "seed": result.seed}
            return [_result(task, dataset, dataset, {**metric, "metric_name": "mean_reward", "metric_args": arguments})]
        row = self._row()
        held_out = str(self.recipe.table.get("data", {}).get("held_out", self.recipe.trained))
        dataset = parse_name(held_out).name if is_hub_name(held_out) else PurePath(held_out).name
        return [
            _result(task, dataset, dataset, {"metric_type": kind, "metric_value": row[name], "metric_name": name})
            for name, kind in METRICS.items()
            if row.get(name) is not None
        ]

    def _row(self) -> Mapping[str, Any]:
        """The metrics of the checkpoint's iteration; empty if the file lacks it."""
        return next((row for row in self.run.rows if row["steps"] == self.steps), {})

    def _introduction(self) -> str:
        recipe = self.recipe
        if isinstance(recipe, ControlRecipe):
            return f"An agent for `{_plain(recipe.task)}`, trained with {recipe.algorithm}"
        if recipe.kind == "reward":
            return f"A reward model, trained on pairs from `{_plain(recipe.trained)}`"
        return f"A language model, trained from `{_plain(recipe.trained)}` ({_plain(recipe.title)})"

    def _results(self) -> str:
        rows = []
        if (result := self.evaluation) is not None:
            value = f"{result.mean_return:.2f} ± {result.std_return:.2f}"
            rows.append(["return", value, f"{result.episodes} greedy episodes, seed {result.seed}"])
        elif isinstance(self.recipe, ControlRecipe) and (mean := self._row().get("evaluation_return")) is not None:
            settings = self.recipe.evaluation
            rows.append(["return", number(mean), f"{settings.episodes} greedy episodes, seed {settings.seed}, in training"])
        how = f"held-out rows, evaluation.seed {self.recipe.evaluation.seed}"
        held_out = {name: value for name, value in self._row().items() if name.startswith("held_out_") and value is not None}
        rows += [[name.removeprefix("held_out_").replace("_", " "), number(value), how] for name, value in held_out.items()]
        rows.append(["training", f"{self.run.steps:,} steps", f"seed {self.recipe.seed}, {duration(self.run.seconds)}"])
        return markdown_table(["", "value", "measured on"], rows)


def _result(task: str, name: str, kind: str, metric: dict[str, Any]) -> dict[str, Any]:
    return {"task_type": task, "task_name": task, "dataset_name": name, "dataset_type": kind, **metric}


def base_model(recipe: Recipe) -> str | None:
    """The hub id of the model that a run and those before it began with; None if it came from elsewhere."""
    name = recipe.trained
    with suppress(SurefootError):
        for _ in range(20):  # runs may name each other
            if not (config := Path(name).expanduser() / "config.toml").is_file():
                break
            name = str(read_toml(config).get("model"))
    if is_hub_name(name):
        return parse_name(name).name
    return name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() else None


def _plain(text: str) -> str:
    """Text in one line without marks of code."""
    return visible(text).replace("`", "'")


def _short(text: Any) -> str:
    text = visible_lines(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def _fenced(text: str, language: str = "text") -> str:
    """A block of code whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max((len(marks) for marks in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
