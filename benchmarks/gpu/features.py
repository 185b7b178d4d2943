"""Steps of ``one.py`` for every setting that a CPU can't try as it is on a GPU, each beside the plain run of ``steps.py``."""

import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import steps as of
import torch
from steps import Numbers, Settings

from surefoot.core.rollout import LearnerState
from surefoot.core.seeding import deterministic
from surefoot.recipes.presets import find_recipe
from surefoot.runs.factory import make_world

CLOSE = 1e-3
"""relative difference of losses that only rounding explains"""


def features_of(settings: Settings) -> dict[str, Callable[[], Numbers]]:
    """The steps; those of SFT and PPO need the runs "sft" and "ppo" of ``steps.py``."""
    sft, same = partial(of.sft, settings), partial(of.same_as, settings)
    return {
        "control as on the CPU": partial(control_on_cpu, settings),
        "control with an LSTM": partial(control, settings, "lstm", network={"lstm": 32}),
        "control with TRPO": partial(control, settings, "trpo", algorithm="TRPO"),
        "tensor environments": partial(tensors, settings),
        "a rollout does not wait for the GPU": partial(waits, settings),
        "a simulator on the GPU": partial(simulator, settings),
        "sft tf32": partial(beside_sft, settings, "sft tf32", 2e-2, tf32=True),
        "sft bf16 resumed": partial(of.sft_resumed, settings, "sft bf16 resumed", precision="bfloat16"),
        "sft bfloat16-weights": partial(sft, "sft bfloat16-weights", precision="bfloat16-weights"),
        "sft padding_free": partial(beside_sft, settings, "sft padding_free", CLOSE, padding_free=True),
        "sft compiled": partial(beside_sft, settings, "sft compiled", CLOSE, engine="compiled"),
        "sft adam-8bit": partial(of.sft_resumed, settings, "sft adam-8bit", optimizer=_adam_8bit(settings)),
        "sft nf4": partial(of.sft_resumed, settings, "sft nf4", adapter={"rank": 8, "quantize": "nf4"}),
        "sft int8": partial(of.sft_resumed, settings, "sft int8", adapter={"rank": 8, "quantize": "int8"}),
        "dpo": partial(of.timed, settings, "dpo", "dpo", settings.pairs()),
        "reward": partial(of.timed, settings, "reward", "reward", settings.pairs()),
        "ppo, four models": partial(four_models, settings, "ppo four"),
        "ppo, four models, offloaded": partial(four_models, settings, "ppo idle", offload=["reference", "reward", "critic"]),
        "offloaded, the losses of four models": partial(same, "ppo idle", "ppo four", 0.0),
        "ppo packed": partial(sampled_by, settings, "packed"),
        "ppo model": partial(sampled_by, settings, "model"),
        "ppo continuous": partial(sampled_by, settings, "continuous"),
        "ppo resumed": partial(of.resumed_exactly, settings, "ppo resumed", "language", settings.ppo(4)),
        "ppo compiled": partial(of.ppo, settings, "ppo compiled", engine="compiled"),
        "ppo compiled, the losses of ppo": partial(same, "ppo compiled", "ppo", 1e-2),
        "grpo padding_free": partial(grpo, settings, "grpo padding_free", padding_free=True),
        "grpo": partial(grpo, settings, "grpo"),
        "padding_free, the losses of grpo": partial(same, "grpo padding_free", "grpo", 1e-2),
    }


def _adam_8bit(settings: Settings) -> dict[str, Any]:
    return {**settings.sft()["optimizer"], "kind": "adam-8bit"}


def control(settings: Settings, name: str, **changes: Any) -> Numbers:
    """CartPole with some settings, resumed."""
    return of.resumed_exactly(settings, f"control {name}", "CartPole-v1", {**settings.control, **changes})


def control_on_cpu(settings: Settings) -> Numbers:
    """The first loss of CartPole on the CPU and on the device: noise and order of rows come from the CPU."""
    fields = settings.control
    one = {**fields, "steps": fields["steps"] // 4}
    for device in ("cpu", settings.device):
        of.train(settings.folder / f"control on {device}", "CartPole-v1", {**one, "device": device})
    return of.same_as(settings, f"control on {settings.device}", "control on cpu", CLOSE)


def tensors(settings: Settings, iterations: int = 12) -> Numbers:
    """Pendulum on the device, resumed; steps per second of all iterations but the first four."""
    rows, horizon = (64, 8) if settings.tiny else (4096, 32)
    fields = {"rollout": {"environments": rows, "steps": horizon}, "device": settings.device, "engine": "eager"}
    fields |= {"steps": iterations * rows * horizon, "objective": {"reuse": {"epochs": 4, "minibatches": 4}}}
    fields |= {"preset": "none", "evaluation": {"episodes": 0}, "traces": {"rows": 0}}
    numbers = of.resumed_exactly(settings, "tensor", "tensor/Pendulum-v1", fields)
    later = of.rows_of(settings.folder / "tensor")[4:]
    seconds = [row["seconds_collecting"] + row["seconds_learning"] for row in later]
    numbers["steps_per_second"] = rows * horizon * len(later) / sum(seconds)
    for phase in ("seconds_collecting", "seconds_learning"):
        numbers[phase] = sum(row[phase] for row in later) / len(later)
    return numbers


SIMULATOR = """
from brax import envs
from surefoot.control.environments.adapters import BraxEnvironment


def make(num_envs, device):
    environment = envs.get_environment("inverted_pendulum", backend="mjx")
    return BraxEnvironment(envs.training.wrap(environment, episode_length=1000, action_repeat=1), num_envs, device)
"""


def simulator(settings: Settings, iterations: int = 4) -> Numbers:
    """MuJoCo's simulator in JAX (MJX) by Brax, if it is installed: resumed, and steps per second after the first iteration."""
    if importlib.util.find_spec("brax") is None:
        return {"left out": "Brax is not installed"}
    rows, horizon = (4, 2) if settings.tiny else (1024, 16)
    settings.folder.joinpath("simulator.py").write_text(SIMULATOR)
    fields = {"rollout": {"environments": rows, "steps": horizon}, "device": settings.device, "preset": "none"}
    fields |= {"steps": iterations * rows * horizon, "evaluation": {"episodes": 0}, "traces": {"rows": 0}}
    fields |= {"objective": {"reuse": {"epochs": 2, "minibatches": 4}}}
    numbers = of.resumed_exactly(settings, "simulator", f"{settings.folder / 'simulator.py'}:make", fields)
    later = of.rows_of(settings.folder / "simulator")[1:]
    seconds = sum(row["seconds_collecting"] for row in later)
    return numbers | {"steps_per_second_collecting": rows * horizon * len(later) / seconds}


def waits(settings: Settings) -> Numbers:
    """A longer rollout of tensor environments waits for the GPU as often as a short one."""
    if settings.device != "cuda":
        return {}
    counts = []
    for horizon in (8, 32):
        fields = {"rollout": {"environments": 256, "steps": horizon}, "device": settings.device}
        fields["objective"] = {"reuse": {"epochs": 1, "minibatches": 1}}
        recipe: Any = find_recipe("tensor/Pendulum-v1", {**fields, "steps": 10**6, "engine": "eager"})
        world, state = make_world(recipe), LearnerState.seeded(1, 10**6)
        world.collector.collect(state)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen, deterministic(True):
                warnings.simplefilter("always")
                world.collector.collect(state)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(each.message) for each in seen))
    assert counts[0] == counts[1], f"waits of rollouts of 8 and 32 steps: {counts}"
    return {"waits per rollout": counts[0]}


def beside_sft(settings: Settings, name: str, tolerance: float, **changes: Any) -> Numbers:
    """SFT with a setting that changes only rounding, resumed."""
    numbers = of.sft_resumed(settings, name, **changes)
    of.same_as(settings, name, "sft", tolerance)
    return numbers


def four_models(settings: Settings, name: str, **changes: Any) -> Numbers:
    """PPO with a critic of its own, a reference, and the reward model that the step "reward" trained."""
    reward = {"terms": [{"model": str(settings.folder / "reward")}], "missing_eos": "none"}
    return of.ppo(settings, name, critic={"own_model": True}, reward=reward, **changes)


def sampled_by(settings: Settings, engine: str) -> Numbers:
    """PPO with a sampling engine."""
    sampling = {**settings.ppo()["sampling"], "engine": engine}
    return of.timed(settings, f"ppo {engine}", "language", settings.ppo(sampling=sampling))


def grpo(settings: Settings, name: str, **changes: Any) -> Numbers:
    """GRPO: groups of four responses to a prompt."""
    fields = settings.ppo(algorithm="GRPO", **changes)
    prompts = fields["sampling"]["prompts"] // 4
    fields["sampling"] = {**fields["sampling"], "prompts": prompts, "samples": 4}
    return of.timed(settings, name, "language", fields)
