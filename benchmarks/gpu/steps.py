"""Steps of ``one.py`` and ``several.py``: short runs on a GPU, each checked, with one report.

Every rank calls every step; a check that fails on one rank fails the step on all, and the next step goes on.
"""

import gc
import json
import platform
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import surefoot
from surefoot.errors import SurefootError
from surefoot.language.data.rows import write_rows
from surefoot.language.memory import estimate
from surefoot.language.memory.check import running_peak, workload_of
from surefoot.ranks.collectives import exchange, on_first, rank, together, world_size
from surefoot.recipes.presets import find_recipe
from surefoot.runs.session.saving import Saver
from surefoot.store.checkpoint import latest_checkpoint, load_checkpoint
from surefoot.store.metrics import read_metrics

LIMIT = 9 * 60
"""seconds after which no further step begins"""
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Where and how large.

    folder  of the runs
    device  "cuda", or "cpu" to try the scripts
    tiny    sizes for a test on a CPU
    """

    folder: Path
    device: str = "cuda"
    tiny: bool = False

    @property
    def control(self) -> dict[str, Any]:
        """A run of CartPole of four iterations."""
        steps = 16 if self.tiny else 256
        fields = {"rollout": {"environments": 8, "steps": steps}, "steps": 4 * 8 * steps, "device": self.device}
        fields |= {"objective": {"reuse": {"epochs": 2, "minibatches": 4}}, "normalise": {"observations": True}}
        return fields | {"evaluation": {"episodes": 0}, "checkpoint": {"every": 16 * steps}}

    @property
    def length(self) -> int:
        """Tokens of a prompt, and of an answer."""
        return 8 if self.tiny else 128

    def sft(self, iterations: int = 4, **changes: Any) -> dict[str, Any]:
        """A run of SFT."""
        batch = 8 if self.tiny else 32
        data = {"train": str(self.folder / "rows.jsonl"), "max_length": 4 * self.length, "batch": batch}
        fields = {"model": str(self.folder / "model"), "data": data, "steps": iterations * batch, "device": self.device}
        fields |= {"evaluation": {"rows": 0}, "checkpoint": {"every": 2 * batch}, "traces": {"rows": 0}}
        fields |= {"optimizer": {"learning_rate": 1e-4, "schedule": "constant", "micro_batch": batch // 4}}
        return {**fields, "check_memory": False, **changes}

    def ppo(self, iterations: int = 3, **changes: Any) -> dict[str, Any]:
        """An online run with a critic, a reference and a reward in Python."""
        prompts = 8 if self.tiny else 64
        fields = self.sft()
        del fields["data"]["batch"]
        fields["optimizer"] = {**fields["optimizer"], "learning_rate": 1e-5}
        terms = [{"function": f"{self.folder / 'rewards.py'}:score"}]
        fields |= {"kind": "language", "algorithm": "PPO_CLIP", "reward": {"terms": terms, "missing_eos": "none"}}
        fields |= {"sampling": {"prompts": prompts, "max_tokens": self.length}, "reference": {"beta": 0.05}}
        fields |= {"objective": {"reuse": {"epochs": 1, "minibatches": 2}}, "steps": iterations * prompts}
        return {**fields, "checkpoint": {"every": 2 * prompts}, **changes}

    def pairs(self, **changes: Any) -> dict[str, Any]:
        """A run of DPO or of a reward model on pairs."""
        fields = self.sft()
        fields["data"]["train"] = str(self.folder / "pairs.jsonl")
        return {**fields, **changes}

    def write_data(self) -> None:
        """A model with random weights, rows, and a reward."""
        from transformers import LlamaConfig, LlamaForCausalLM

        from surefoot.language.models.pocket import character_tokenizer

        self.folder.mkdir(parents=True, exist_ok=True)
        tokenizer = character_tokenizer(context=1024)
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        if not self.tiny:
            size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
        torch.manual_seed(1)
        config = LlamaConfig(
            **size, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        model = LlamaForCausalLM(config)
        for name, dtype in (("model", torch.float32), ("model-bf16", torch.bfloat16)):
            model.to(dtype).save_pretrained(self.folder / name)
            tokenizer.save_pretrained(self.folder / name)
        text = "The quick brown fox jumps over the lazy dog. " * 8
        rows, pairs = [], []
        for i in range(1, 65):  # of unlike lengths
            prompt, answer = text[i : i + self.length], text[-self.length - i : -i - self.length * (i % 4) // 4]
            rows.append({"prompt": prompt, "completion": answer})
            pairs.append({"prompt": prompt, "chosen": answer, "rejected": answer[::-1] + "."})
        write_rows(self.folder / "rows.jsonl", rows)
        write_rows(self.folder / "pairs.jsonl", pairs)
        source = "def score(responses):\n    return [len(set(text)) / 50 for text in responses]\n"
        (self.folder / "rewards.py").write_text(source)


# ---- steps ------------------------------------------------------------------------------------------------------------


def control(settings: Settings) -> Numbers:
    """CartPole; stopped in the middle and resumed, it ends with the same weights."""
    return resumed_exactly(settings, "control", "CartPole-v1", settings.control)


def sft(settings: Settings, name: str, **changes: Any) -> Numbers:
    """SFT with some settings."""
    return timed(settings, name, "sft", settings.sft(**changes))


def sft_resumed(settings: Settings, name: str, **changes: Any) -> Numbers:
    """The same, stopped and resumed."""
    return resumed_exactly(settings, name, "sft", settings.sft(**changes))


def ppo(settings: Settings, name: str, **changes: Any) -> Numbers:
    """An online run; the policy that samples is the one that learns, so the ratio begins at 1 and the KL at 0."""
    fields = settings.ppo(**changes)
    numbers = timed(settings, name, "language", fields)
    low = fields.get("precision") == "bfloat16"
    row = rows_of(settings.folder / name)[0]
    with together():
        _near("ratio_at_start", row["ratio_at_start"], 1.0, 0.1 if low else 1e-3)
        _near("kl_reference", row["kl_reference"], 0.0, 0.05 if low else 1e-3)
    return numbers


def planned(settings: Settings, name: str, run: str, kind: str, fields: dict[str, Any]) -> Numbers:
    """The memory that a run took, beside the planner's estimate. A ratio, not a check: fragmentation is not planned."""
    recipe: Any = find_recipe(kind, fields)
    expected = running_peak(estimate(workload_of(recipe, prompt=settings.length, response=settings.length)))
    measured = json.loads((settings.folder / run / "measured.json").read_text())["peak_gb"]
    return {
        "planned_gb": expected / 1e9,
        "peak_gb": measured,
        "peak/planned": measured / (expected / 1e9) if measured else None,
    }


def same_as(settings: Settings, name: str, other: str, tolerance: float) -> Numbers:
    """The losses of two runs agree; a loss near 0 (normalised advantages, one visit) to the tolerance of a loss of 0.001."""
    ours, theirs = (rows_of(settings.folder / run) for run in (name, other))
    numbers = {}
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        numbers[f"loss {number}"] = [a["policy_loss"], b["policy_loss"]]
        _near(
            f"policy_loss of iteration {number}",
            a["policy_loss"],
            b["policy_loss"],
            tolerance * max(abs(b["policy_loss"]), 1e-3),
        )
    return numbers


def on_cpu(settings: Settings) -> Numbers:
    """The first losses of SFT in float32 on the CPU, with few rows, and on the device."""
    fields = settings.sft(iterations=2)
    batch = 8
    data, optimizer = {**fields["data"], "batch": batch}, {**fields["optimizer"], "micro_batch": 2}
    fields |= {"data": data, "optimizer": optimizer, "steps": 2 * batch, "checkpoint": {"every": batch}}
    for device in ("cpu", settings.device):
        train(settings.folder / f"sft on {device}", "sft", {**fields, "device": device})
    return same_as(settings, f"sft on {settings.device}", "sft on cpu", 1e-3)


def train(run: Path, task: str, fields: Mapping[str, Any]) -> Any:
    """Train in a folder, which is deleted first."""
    with together():
        if rank() == 0:
            shutil.rmtree(run, ignore_errors=True)
    return surefoot.train(task, run_dir=run, display=False, **fields)


def timed(settings: Settings, name: str, kind: str, fields: dict[str, Any]) -> Numbers:
    """Train; speed after the first iteration, peak memory of each rank, and how long checkpoints made training wait."""
    cuda = settings.device == "cuda"
    gc.collect()  # what earlier steps leave would count
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    pauses: list[float] = []
    copy = Saver.copy

    def timed_copy(saver: Saver, *arguments: Any, **named: Any) -> None:
        before = time.perf_counter()
        copy(saver, *arguments, **named)
        pauses.append(time.perf_counter() - before)

    Saver.copy = timed_copy  # type: ignore[method-assign]
    began = time.perf_counter()
    try:
        train(settings.folder / name, kind, fields)
    finally:
        Saver.copy = copy  # type: ignore[method-assign]
    seconds = time.perf_counter() - began
    peaks = exchange(torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0)
    rows = rows_of(settings.folder / name)
    tokens = [row["tokens"] for row in rows[1:] if row.get("tokens")]
    learning = [row["seconds_learning"] for row in rows[1:]]
    numbers = {"seconds": seconds, "peak_gb": max(peaks), "peak_gb_of_ranks": peaks, "waited": sum(pauses) / seconds}
    numbers["loss"] = [row["policy_loss"] for row in rows]
    if tokens:
        numbers["tokens_per_second_learning"] = sum(tokens) / sum(learning)
    if rows[-1].get("tokens_per_second"):
        numbers["tokens_per_second_sampling"] = rows[-1]["tokens_per_second"]
    with together():
        assert all(row["policy_loss"] is not None for row in rows), "losses are numbers"
        if rank() == 0:
            (settings.folder / name / "measured.json").write_text(json.dumps(numbers))
    return numbers


def resumed_exactly(settings: Settings, name: str, task: str, fields: dict[str, Any]) -> Numbers:
    """Train; train again, stop in the middle and resume: all tensors of the two last checkpoints are equal, of the policy, the
    optimizers and what collects.
    """
    numbers = timed(settings, name, task, fields)
    whole, cut = settings.folder / name, settings.folder / f"{name} cut"
    train(cut, task, {**fields, "callback": lambda metrics: metrics["steps"] >= fields["steps"] // 2})
    surefoot.resume(cut, display=False)

    def compare() -> int:
        ours, theirs = (_tensors(load_checkpoint(_latest(run))) for run in (cut, whole))
        assert ours.keys() == theirs.keys()
        different = [key for key in theirs if not torch.equal(ours[key], theirs[key])]
        assert not different, f"{len(different)} of {len(theirs)} tensors differ after resuming: {different[:3]}"
        return len(theirs)

    return numbers | {"tensors equal after resuming": on_first(compare)}


def _tensors(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, by their paths."""
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    return {key: tensor for name, part in items for key, tensor in _tensors(part, f"{path}/{name}").items()}


def _latest(run: Path) -> Path:
    checkpoint = latest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    return checkpoint


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run's iterations."""
    return on_first(lambda: read_metrics(run / "metrics.jsonl"))


def _near(name: str, value: float, expected: float, tolerance: float) -> None:
    assert abs(value - expected) <= tolerance, f"{name} is {value:.6g}, expected {expected:.6g} within {tolerance:g}"


# ---- running and reporting --------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What ran."""

    title: str
    machine: Numbers
    steps: list[Numbers] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """Names of steps that failed."""
        return [step["name"] for step in self.steps if step["error"]]

    def markdown(self) -> str:
        """As a page."""
        lines = [f"# {self.title}", "", *(f"- {name}: {value}" for name, value in self.machine.items()), ""]
        lines += ["| step | result | seconds | numbers |", "|---|---|---|---|"]
        for step in self.steps:
            numbers = "; ".join(f"{name} {_shown(value)}" for name, value in step["numbers"].items())
            lines.append(f"| {step['name']} | {step['error'] or 'passed'} | {step['seconds']:.1f} | {numbers} |")
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Write report.json and report.md."""
        folder.mkdir(parents=True, exist_ok=True)
        table = {"title": self.title, "machine": self.machine, "steps": self.steps}
        (folder / "report.json").write_text(json.dumps(table, indent=1) + "\n", "utf-8")
        (folder / "report.md").write_text(self.markdown(), "utf-8")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine(device: str) -> Numbers:
    """What the numbers depend on."""
    numbers: Numbers = {"surefoot": surefoot.__version__, "torch": torch.__version__, "python": platform.python_version()}
    numbers |= {"ranks": world_size(), "device": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        numbers |= {"GPU": properties.name, "GPUs": torch.cuda.device_count(), "memory_gb": properties.total_memory / 1e9}
        numbers |= {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return numbers


def run_steps(
    title: str, settings: Settings, steps: Mapping[str, Callable[[], Numbers]], out: Path | None = None, limit: float = LIMIT
) -> Report:
    """Run steps one after another on all ranks; an error of any kind is in the report, and the next step begins.

    out     folder of the report, which is written after every step
    limit   seconds after which no further step begins
    """
    with together():
        if rank() == 0:
            settings.write_data()
    report, began = Report(title, machine(settings.device)), time.monotonic()
    for name, step in steps.items():
        numbers, error, started = {}, None, time.monotonic()
        if on_first(lambda started=started: started - began > limit):
            error = "not begun: out of time"
        else:
            try:
                numbers = step()
            except Exception as problem:
                traceback.print_exc()
                error = " ".join(f"{type(problem).__name__}: {problem}".split())[:500]
            error = next((each for each in exchange(error) if each), None)
        report.steps.append({"name": name, "error": error, "seconds": time.monotonic() - started, "numbers": numbers})
        if rank() == 0:
            print(f"{name}: {error or 'passed'} ({report.steps[-1]['seconds']:.1f} s)", flush=True)
            if out is not None:
                report.write(out)
    return report


def steps_of(settings: Settings, only: Sequence[str] | None = None) -> dict[str, Callable[[], Numbers]]:
    """The steps for this number of ranks, or some of them: NCCL and sharding are exercised with several."""
    low = {"precision": "bfloat16", "gradient_checkpointing": True}
    stored = {"model": str(settings.folder / "model-bf16")}
    steps: dict[str, Callable[[], Numbers]] = {
        "control": partial(control, settings),
        "sft": partial(sft_resumed, settings, "sft"),
        "sft bf16": partial(sft, settings, "sft bf16", **low),
        "ppo": partial(ppo, settings, "ppo"),
        "ppo bf16": partial(ppo, settings, "ppo bf16", **low, critic={"own_model": True}),
    }
    if world_size() == 1:
        steps["sft as on the CPU"] = partial(on_cpu, settings)
    else:
        full = {"sharding": "full"}
        steps |= {
            "sft sharded": partial(sft_resumed, settings, "sft sharded", **full),
            "sft sharded, the losses of sft": partial(same_as, settings, "sft sharded", "sft", 1e-3),
            "sft sharded bf16 files": partial(sft, settings, "sft sharded bf16 files", **full, **low, **stored),
            "sft sharded, kept gathered": partial(sft, settings, "sft kept", **full, reshard_after_forward=False),
            "sft sharded, offloaded": partial(sft, settings, "sft offload", **full, offload=True),
            "ppo sharded bf16": partial(ppo, settings, "ppo sharded bf16", **full, **low, critic={"own_model": True}),
        }
        if world_size() % 2 == 0 and world_size() > 2:
            steps["sft hybrid"] = partial(sft, settings, "sft hybrid", sharding="hybrid")
    for run, kind, fields in (("sft", "sft", settings.sft()), ("ppo", "language", settings.ppo())):
        steps[f"memory of {run}"] = partial(planned, settings, run, run, kind, fields)
    return chosen(steps, only)


def chosen(steps: dict[str, Callable[[], Numbers]], only: Sequence[str] | None) -> dict[str, Callable[[], Numbers]]:
    """The steps of these names, or all. Raises SurefootError for a name that is none: it would pass without running."""
    for name in only or ():
        if name not in steps:
            raise SurefootError(f"--only {name!r}: is no step of this script; name some of: {', '.join(steps)}")
    return {name: step for name, step in steps.items() if only is None or name in only}
