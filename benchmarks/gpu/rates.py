"""Steps of ``one.py`` that measure a larger model: SFT and PPO in bfloat16 beside the plans of their time and memory."""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from steps import Numbers, Settings

sys.path.insert(0, str(Path(__file__).parents[1]))
from memory import built, online, rows_in
from plan import GPUS, iteration_time

from surefoot.core.credit import assign_credit
from surefoot.core.rollout import LearnerState
from surefoot.core.seeding import deterministic, prepare_gpu
from surefoot.language.memory import estimate
from surefoot.language.memory.check import running_peak, workload_of
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner, make_world

LOW = {"precision": "bfloat16"}
WEIGHTS = {"precision": "bfloat16-weights"}
MEDIUM = {"width": 1024, "layers": 24, "rows": 32, "prompt": 512, "response": 512}
LARGE = {"width": 2048, "layers": 20, "rows": 16, "prompt": 512, "response": 512}
ONLINE = {"width": 1024, "layers": 24, "rows": 32, "prompt": 384, "response": 128}
TINY = {"width": 32, "layers": 2, "rows": 4, "prompt": 8, "response": 8}
KINDS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "sft": (MEDIUM, {}),
    "sft bfloat16": (MEDIUM, LOW),
    "sft bfloat16, any algorithms": (MEDIUM, {**LOW, "deterministic": False}),
    "sft bfloat16 compiled": (MEDIUM, {**LOW, "engine": "compiled"}),
    "sft bfloat16-weights": (MEDIUM, WEIGHTS),
    "sft bfloat16, large": (LARGE, LOW),
    "sft bfloat16-weights compiled, large": (LARGE, {**WEIGHTS, "engine": "compiled"}),
    "ppo": (ONLINE, {}),
    "ppo bfloat16": (ONLINE, LOW),
    "ppo bfloat16-weights": (ONLINE, WEIGHTS),
}
"""of each step the sizes of the model, a Llama, and of its rows; and the settings"""


def rates_of(settings: Settings) -> dict[str, Callable[[], Numbers]]:
    """The steps."""
    return {f"speed of {name}": partial(speed, settings, name, *each) for name, each in KINDS.items()}


def speed(settings: Settings, name: str, size: dict[str, int], fields: dict[str, Any], iterations: int = 3) -> Numbers:
    """Seconds of the phases of an iteration, each phase beside the plan's, and the peak of memory beside that plan's."""
    size, cuda = TINY if settings.tiny else size, settings.device == "cuda"
    recipe: Any = make_recipe(table_of(settings, name[:3], size) | fields)
    workload = workload_of(recipe, prompt=size["prompt"], response=size["response"])
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    world = make_world(recipe)
    learner = make_learner(recipe, world.policy)
    learner.auxiliary_loss = world.auxiliary_loss
    state = LearnerState.seeded(recipe.seed, recipe.steps)
    measured: list[dict[str, float]] = []
    collector: Any = world.collector
    sampling = [0.0]
    if hasattr(collector, "respond"):
        respond = collector.respond

        def timed(*arguments: Any) -> Any:
            started = _clock(cuda)
            output = respond(*arguments)
            sampling[0] = _clock(cuda) - started
            return output

        collector.respond = timed
    prepare_gpu(recipe.device)
    for _ in range(1 + iterations):
        started = _clock(cuda)
        with deterministic(recipe.deterministic and cuda):
            rollout = collector.collect(state)
            collected = _clock(cuda)
            learner.update(rollout, assign_credit(rollout, learner.objective), state)
        state.steps += rollout.steps
        times = {"learning": _clock(cuda) - collected}
        if recipe.kind == "language":
            times |= {"sampling": sampling[0], "scoring": collected - started - sampling[0]}
        measured.append(times)
    numbers: Numbers = {"parameters": sum(p.numel() for p in world.policy.parameters())}
    layout = replace(workload.layout, gpu=True)
    name = torch.cuda.get_device_name() if cuda else ""
    gpu = next((GPUS[each] for each in GPUS if each in name), GPUS["H200"])
    gpu = gpu if workload.bf16 or workload.low_weights else gpu.in_float32()
    planned = iteration_time(replace(workload, layout=layout), gpu).seconds
    for phase in measured[0]:
        seconds = min(times[phase] for times in measured[1:])
        numbers |= {f"{phase}_seconds": seconds, f"{phase}_planned": planned[phase]}
    read = size["rows"] * (size["prompt"] + size["response"])
    numbers["tokens_per_second_learning"] = read / numbers["learning_seconds"]
    if recipe.kind == "language":
        numbers["tokens_per_second_sampling"] = int(rollout.mask.sum()) / numbers["sampling_seconds"]
    if cuda:
        numbers["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        numbers["planned_gb"] = running_peak(estimate(replace(workload, layout=layout))) / 1e9
    return numbers


def table_of(settings: Settings, kind: str, size: dict[str, int]) -> dict[str, Any]:
    """The recipe table, with its model and rows written to the folder once."""
    folder = settings.folder / f"model of width {size['width']} for {size['prompt']} + {size['response']} tokens"
    if not folder.exists():
        folder.mkdir(parents=True)
        context = size["prompt"] + size["response"] + 8
        built(folder / "model", "llama", size["width"], size["layers"], vocabulary=8192, context=context)
        rows_in(folder, size["prompt"], size["response"], count=4 * size["rows"])
    rate = {"learning_rate": 1e-6, "micro_batch": size["rows"] // 4}
    fields: dict[str, Any] = {"device": settings.device, "steps": 16 * size["rows"], "check_memory": False, "optimizer": rate}
    length = size["prompt"] + size["response"] + 8
    if kind == "sft":
        data = {"train": str(folder / "demonstrations.jsonl"), "max_length": length, "batch": size["rows"]}
        return {"kind": "sft", "model": str(folder / "model"), "data": data, **fields}
    files = {"prompts": str(folder / "prompts.jsonl"), "function": f"{folder / 'rewards.py'}:vowels"}
    sampling = {"prompts": size["rows"], "max_tokens": size["response"]}
    return online(folder / "model", files, critic={"own_model": True}, sampling=sampling, **fields)


def _clock(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
