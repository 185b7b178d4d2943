"""Peak memory of real runs, phase by phase, compared with the estimate made before a run.

    python benchmarks/memory.py                     every configuration; writes docs/benchmarks/memory.md from the results
    python benchmarks/memory.py --only shared own   some of them

Each configuration is a line of benchmarks/results/memory.jsonl; an existing one is skipped. Two iterations are measured by the
records of PyTorch's CPU allocator in the profiler, which include temporary buffers of kernels. Resident memory includes freed
pages.
"""

import argparse
import gc
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import surefoot
from surefoot.compare.statistics import markdown_table
from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState
from surefoot.language.memory import estimate
from surefoot.language.memory.check import workload_of
from surefoot.language.memory.parameters import count_parameters
from surefoot.language.memory.probe import HeapTracker
from surefoot.language.models.pocket import character_tokenizer
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner, make_world

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "benchmarks" / "memory.md", ROOT / "benchmarks" / "results" / "memory"
PROMPT, ANSWER = 64, 32
"""tokens, at most"""
PHASES = ("sampling", "scoring", "learning")
LETTERS = "abcdefghij "
RANK = 8
"""of adapters"""
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64},
    "gemma2": {"head_dim": 64, "num_key_value_heads": 4},
}
"""what configurations of these families have besides"""


def built(folder: Path, family: str, width: int, layers: int, vocabulary: int, context: int = 256, tied: bool = False) -> Path:
    """A folder with a model of a family, with random weights, and a character tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    heads = max(2, width // 64)
    if family == "gpt2":
        shape: dict[str, Any] = {
            "n_embd": width,
            "n_layer": layers,
            "n_head": heads,
            "n_positions": context,
            "bos_token_id": None,
        }
    else:
        shape = {
            "hidden_size": width,
            "intermediate_size": width * 11 // 4,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2 if family == "qwen2" else heads,
            "max_position_embeddings": context,
            "tie_word_embeddings": tied,
            **EXPERTS.get(family, {}),
        }
    config = AutoConfig.for_model(family, vocab_size=vocabulary, eos_token_id=1, pad_token_id=0, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    character_tokenizer(context=context).save_pretrained(folder)
    return folder


def rows_in(folder: Path, prompt: int, answer: int, count: int = 64) -> dict[str, str]:
    """Files of prompts, demonstrations and pairs, of at most these lengths, and a reward function."""
    drawn = torch.Generator().manual_seed(1)

    def text(length: int) -> str:
        return "".join(LETTERS[i] for i in torch.randint(0, len(LETTERS), (length,), generator=drawn).tolist())

    rows: dict[str, list[dict[str, str]]] = {"prompts": [], "demonstrations": [], "pairs": []}
    for number in range(count):
        prompt_text = text(prompt - number % 4)
        rows["prompts"].append({"prompt": prompt_text})
        rows["demonstrations"].append({"prompt": prompt_text, "completion": text(answer - 1)})
        rows["pairs"].append({"prompt": prompt_text, "chosen": text(answer - 1), "rejected": text(answer - 1)})
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    (folder / "rewards.py").write_text(
        "def vowels(responses):\n    return [float(t.count('a') - t.count('b')) for t in responses]\n"
    )
    return {name: str(folder / f"{name}.jsonl") for name in rows} | {"function": f"{folder / 'rewards.py'}:vowels"}


def online(model: Path, files: dict[str, str], tokens: int = 32, **fields: Any) -> dict[str, Any]:
    """The recipe table of an online run with a model folder."""
    table: dict[str, Any] = {
        "kind": "language",
        "model": str(model),
        "steps": 64,
        "data": {"train": files["prompts"]},
        "sampling": {"prompts": 16, "max_tokens": tokens},
        "reward": {"terms": [{"function": files["function"]}], "missing_eos": "none"},
        "objective": {"reuse": {"epochs": 1, "minibatches": 2}},
        "optimizer": {"learning_rate": 1e-5},
    }
    for name, value in fields.items():
        table[name] = {**table[name], **value} if isinstance(table.get(name), dict) else value
    return table


class Watched:
    """Runs a recipe and measures the peak of each phase: of the allocator, or of a ``tracker`` of live bytes."""

    def __init__(self, recipe: Any, tracker: HeapTracker | None = None) -> None:
        self.recipe, self.tracker = recipe, tracker
        self.peaks: dict[str, int] = {}
        """bytes by phase"""

    def run(self, iterations: int = 2) -> None:
        """Run the iterations; Adam's moments are allocated in the first."""
        torch.set_num_threads(self.recipe.threads)
        gc.collect()  # memory of an earlier run, if freed during this one, would be counted by the profiler
        if self.tracker is not None:
            with self.tracker:
                self._iterate(iterations)
            return
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            self._iterate(iterations)
        self.peaks = by_phase(seen)

    def _iterate(self, iterations: int) -> None:
        world = make_world(self.recipe)
        learner = make_learner(self.recipe, world.policy)
        learner.auxiliary_loss = world.auxiliary_loss
        gc.collect()  # weights as they were read, before they were rounded or quantised
        state = LearnerState.seeded(self.recipe.seed, self.recipe.steps)
        collector = world.collector
        if hasattr(collector, "respond"):
            respond = collector.respond

            def sampling(*args: Any) -> Any:
                with self.phase("sampling"):
                    output = respond(*args)
                if self.tracker is not None:
                    self.tracker.restart()  # what follows in collect is scoring
                return output

            collector.respond = sampling
        for _ in range(iterations):
            with self.phase("scoring"):
                rollout = collector.collect(state)
            with self.phase("learning"):
                learner.update(rollout, assign_credit(rollout, learner.objective), state)
            state.steps += rollout.steps
            if getattr(world, "demonstrations", None) is not None:
                with self.phase("evaluating"):
                    world.evaluate()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase."""
        if self.tracker is not None:
            self.tracker.restart()
        with record_function(f"phase {name}"):
            yield
        if self.tracker is not None:
            self.peaks[name] = max(self.peaks.get(name, 0), self.tracker.peak)


def by_phase(seen: Any) -> dict[str, int]:
    """The peak of the allocator in each phase; an inner phase is not part of the outer one."""
    events = seen.profiler.kineto_results.events()
    spans = sorted((e.start_ns(), e.end_ns(), e.name().removeprefix("phase ")) for e in events if e.name().startswith("phase "))
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peaks: dict[str, int] = {}
    live = 0
    for when, change in changes:
        live += change
        inside = [(end - start, name) for start, end, name in spans if start <= when <= end]
        if inside:
            name = min(inside)[1]
            peaks[name] = max(peaks.get(name, 0), live)
    return peaks


def scored(base: Path, folder: Path, pairs: str, adapter: bool) -> str:
    """Train a reward model on two pairs: with its own weights, or as an adapter."""
    table: dict[str, Any] = {
        "model": str(base),
        "steps": 2,
        "data": {"train": pairs, "max_length": 128, "batch": 2},
        "optimizer": {"learning_rate": 1e-5},
    }
    if adapter:
        table |= {"adapter": {"rank": RANK, "merge": False}}
    surefoot.train("reward", run_dir=folder, check_memory=False, **table)
    gc.collect()
    return str(folder)


def large(folder: Path, files: dict[str, str], name: str) -> dict[str, Any]:
    """Four roles of 112 million parameters each: separate, with a shared trunk, or as adapters of one base."""
    base = folder / "large"
    if not base.exists():
        built(base, "llama", width=768, layers=12, vocabulary=16384)
    adapter = name == "large_adapters"
    scores = scored(base, folder / name, files["pairs"], adapter)
    fields: dict[str, Any] = {"reward": {"terms": [{"model": scores}], "missing_eos": "none"}}
    if name != "large_shared":
        fields["critic"] = {"own_model": True}
    if adapter:
        fields["adapter"] = {"rank": RANK}
    return online(base, files, **fields)


def configurations(folder: Path) -> dict[str, Any]:
    """The configurations to measure, as tables or functions that make them."""
    files = rows_in(folder, prompt=PROMPT, answer=ANSWER)
    llama = built(folder / "llama", "llama", width=512, layers=6, vocabulary=8192)
    qwen = built(folder / "qwen2", "qwen2", width=384, layers=8, vocabulary=16384, tied=True)
    gpt2 = built(folder / "gpt2", "gpt2", width=512, layers=4, vocabulary=8192)
    rows = {"max_length": 128, "batch": 16}
    sft = {"kind": "sft", "model": str(llama), "steps": 64, "data": {"train": files["demonstrations"], **rows}}
    pairs = {"model": str(llama), "steps": 64, "data": {"train": files["pairs"], **rows}}
    dpo = {"kind": "dpo", **pairs}
    return {
        "shared": online(llama, files),
        "own": online(llama, files, critic={"own_model": True}),
        "none": online(llama, files, algorithm="REINFORCE_BASELINE", objective={"reuse": None}),
        "checkpointed": online(llama, files, gradient_checkpointing=True),
        "micro": online(llama, files, optimizer={"micro_batch_tokens": 200}),
        "own_micro": online(llama, files, critic={"own_model": True}, optimizer={"micro_batch_tokens": 200}),
        "bf16": online(llama, files, precision="bfloat16"),
        "bf16_weights": online(llama, files, critic={"own_model": True}, precision="bfloat16-weights"),
        "qwen2": online(qwen, files, sampling={"samples": 2, "prompts": 8}),
        "gpt2": online(gpt2, files),
        "sft": sft,
        "reward": {"kind": "reward", **pairs},
        "dpo": dpo,
        "dpo_checkpointed": {**dpo, "gradient_checkpointing": True},
        "dpo_bf16": {**dpo, "precision": "bfloat16"},
        "adapters": online(llama, files, critic={"own_model": True}, adapter={"rank": RANK}),
        "adapters_bf16": online(llama, files, adapter={"rank": RANK}, precision="bfloat16-weights"),
        "nf4": {**sft, "adapter": {"rank": RANK, "quantize": "nf4"}},
        "int8": {**sft, "adapter": {"rank": RANK, "quantize": "int8"}},
        "qwen2_adapters": {**sft, "model": str(qwen), "adapter": {"rank": RANK}, "gradient_checkpointing": True},
        "gpt2_bf16": {**sft, "model": str(gpt2), "precision": "bfloat16"},
        "gpt2_adapters": online(gpt2, files, adapter={"rank": RANK}),
        "gemma2": online(built(folder / "gemma2", "gemma2", width=512, layers=4, vocabulary=8192), files),
        "mixtral": online(built(folder / "mixtral", "mixtral", width=256, layers=4, vocabulary=8192), files),
        "qwen3_moe": {**sft, "model": str(built(folder / "qwen3_moe", "qwen3_moe", width=256, layers=4, vocabulary=8192))},
        **{name: partial(large, folder, files, name) for name in ("large_own", "large_shared", "large_adapters")},
    }


TITLES = {
    "shared": "PPO, value head on a shared trunk",
    "own": "PPO, a value model of its own",
    "none": "Llama, REINFORCE with the mean as baseline, no critic",
    "checkpointed": "shared, `gradient_checkpointing`",
    "micro": "shared, `micro_batch_tokens = 200`",
    "own_micro": "a value model, `micro_batch_tokens = 200`",
    "bf16": 'shared, `precision = "bfloat16"`',
    "bf16_weights": 'a value model, `precision = "bfloat16-weights"`',
    "qwen2": "Qwen2 (tied embeddings, grouped queries), PPO, shared trunk",
    "gpt2": "GPT-2, PPO, shared trunk",
    "sft": "SFT",
    "reward": "reward model",
    "dpo": "DPO",
    "dpo_checkpointed": "DPO, `gradient_checkpointing`",
    "dpo_bf16": 'DPO, `precision = "bfloat16"`',
    "adapters": "PPO, policy and value model as adapters of one base",
    "adapters_bf16": 'adapters, shared trunk, `precision = "bfloat16-weights"`',
    "nf4": "SFT, adapters of a base in nf4",
    "int8": "SFT, adapters of a base in int8",
    "qwen2_adapters": "Qwen2, SFT, adapters, `gradient_checkpointing`",
    "gpt2_bf16": 'GPT-2, SFT, `precision = "bfloat16"`',
    "gpt2_adapters": "GPT-2, PPO, adapters",
    "gemma2": "Gemma 2, PPO, shared trunk",
    "mixtral": "Mixtral (4 experts), PPO, shared trunk",
    "qwen3_moe": "Qwen3-MoE (8 experts), SFT",
    "large_own": "112 M parameters, four separate models",
    "large_shared": "112 M, value head on a shared trunk; reference and reward model apart",
    "large_adapters": "112 M, one base: policy, value and reward are adapters, reference is the base",
}
OFF_PAGE = ("none", "micro", "own_micro", "qwen2", "dpo_checkpointed", "dpo_bf16", "qwen2_adapters", "gpt2_bf16")
OFF_PAGE += ("gpt2_adapters", "qwen3_moe")
"""measured, but not in the table of the page"""


def measured(name: str, table: dict[str, Any]) -> dict[str, Any]:
    """Measure one configuration, beside its estimate."""
    recipe = make_recipe(table)
    response = 0 if recipe.kind == "reward" else ANSWER
    setup = workload_of(recipe, prompt=PROMPT + ANSWER - response, response=response)
    estimated = estimate(setup)
    watched = Watched(recipe)
    watched.run()
    phases = {
        phase: {"estimate": estimated.at(phase), "allocator": peak}
        for phase, peak in watched.peaks.items()
        if phase in estimated.phases
    }
    return {"name": name, "parameters": count_parameters(setup.policy).total, "stays": estimated.permanent, "phases": phases}


def line(cell: dict[str, Any]) -> list[str]:
    """A row of the table: what stays, and for each phase the measured peak with the error of the estimate."""
    peaks = [cell["phases"].get(phase) for phase in PHASES]
    shown = [x and f"{x['allocator'] / 1e6:,.0f} ({x['estimate'] / x['allocator'] - 1:+.1%})" for x in peaks]
    return [TITLES[cell["name"]], f"{cell['stays'] / 1e6:,.0f}", *(x or "" for x in shown)]


def main() -> None:
    """Measure missing configurations, and write the page from all results."""
    from record import finished, write  # the tests import this file from elsewhere

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TITLES), default=list(TITLES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for name, recipe in configurations(Path(temporary)).items():
            if name in options.only and not finished(RESULTS / name):
                write(RESULTS / name, measured(name, recipe() if callable(recipe) else recipe))
                print(finished(RESULTS / name), flush=True)
    header = ["run", "stays", *PHASES]
    cells = [cell for name in TITLES if name not in OFF_PAGE and (cell := finished(RESULTS / name))]
    table = markdown_table(header, [line(cell) for cell in cells])
    text = PAGE.read_text("utf-8")
    begin, end = "<!-- begin: benchmarks/memory.py -->", "<!-- end -->"
    PAGE.write_text(f"{text.partition(begin)[0]}{begin}\n{table}\n{end}{text.partition(end)[2]}", "utf-8")


if __name__ == "__main__":
    main()
