"""Record one real step of TRPO beside PPO's on the same batch, for the page "How PPO works": docs/site/how/step.json.

    python docs/record_step.py

The picture is the plane through θ_old that holds the gradient and TRPO's full step. Its first axis points along the step, whose
length is the unit.
"""

import json
from pathlib import Path
from typing import Any

import contourpy
import numpy as np
import torch
from torch import Tensor

import surefoot
from surefoot.core.rollout import map_tensors
from surefoot.core.steps.trpo import NaturalStepper
from surefoot.functional import clipped_surrogate, importance_ratio, line_search

FILE = Path(__file__).resolve().parent / "site" / "how" / "step.json"
ACROSS, UP = np.linspace(-1.3, 1.5, 41), np.linspace(-0.3, 0.3, 31)
EPOCHS, MINIBATCHES, CLIP, RATE = 10, 4, 0.2, 1e-3
"""of PPO"""
DAMPING = 0.001
"""of TRPO's curvature; with the usual 0.1 its first try is nearly always short enough"""
FEWEST_TRIES = 3
"""of the line search in the update that is shown"""


class Recorder:
    """Takes the place of ``NaturalStepper._move``: looks around before a step, and then takes it."""

    def __init__(self) -> None:
        self.real = NaturalStepper._move
        self.found: dict[str, Any] = {}
        self.updates = 0

    def __call__(self, stepper: NaturalStepper, rows: Any, denominator: Tensor, step: Any) -> bool:
        self.updates += 1
        old, gradients = stepper.own.values.clone(), stepper.own.gradients.clone()
        full = stepper._full_step(rows, denominator)
        assert full is not None
        tries = self.tries(stepper, rows, denominator, old, full)
        if not self.found and len(tries) >= FEWEST_TRIES and tries[-1]["accepted"]:
            self.found = {
                "update": self.updates,
                "tries": tries,
                **self.look(stepper, rows, denominator, old, -gradients, full),
            }
        stepper.own.values.copy_(old)
        stepper.own.gradients.copy_(gradients)
        return self.real(stepper, rows, denominator, step)

    def at(self, stepper: NaturalStepper, rows: Any, denominator: Tensor, theta: Tensor) -> tuple[float, float]:
        """Surrogate and KL of a policy."""
        stepper.own.values.copy_(theta)
        there = stepper._surrogate(rows, denominator)
        return there.gain, there.kl

    def tries(self, stepper: NaturalStepper, rows: Any, denominator: Tensor, old: Tensor, full: Tensor) -> list[dict[str, Any]]:
        """What the line search finds at each length."""
        constraint, found = stepper.constraint, []
        start, _ = self.at(stepper, rows, denominator, old)

        def evaluate(step: Tensor) -> tuple[float, float]:
            gain, kl = self.at(stepper, rows, denominator, old + step)
            found.append({"length": float(step.norm() / full.norm()), "gain": gain - start, "kl": kl, "accepted": False})
            return gain - start, kl

        if line_search(evaluate, full, constraint.delta, constraint.shrink, constraint.tries) is not None:
            found[-1]["accepted"] = True
        return found

    def look(
        self, stepper: NaturalStepper, rows: Any, denominator: Tensor, old: Tensor, uphill: Tensor, full: Tensor
    ) -> dict[str, Any]:
        """The plane: surrogate and contours of the KL, the two directions, and the way of PPO."""
        unit = full.norm()
        first = full / unit
        second = uphill - (uphill @ first) * first
        second = second / second.norm()
        start, _ = self.at(stepper, rows, denominator, old)
        values = np.array(
            [
                [self.at(stepper, rows, denominator, old + unit * (x * first + y * second)) for x in ACROSS.tolist()]
                for y in UP.tolist()
            ]
        )
        delta = stepper.constraint.delta
        lines = contourpy.contour_generator(ACROSS, UP, values[..., 1])
        kls = [delta / 4, delta, 4 * delta]
        slope = uphill / uphill.norm()
        stepper.own.values.copy_(old)
        matvec = stepper.passes.curvature(rows, denominator, stepper.own.parameters)
        curvature = {name: float(v @ matvec(v)) for name, v in (("gradient", slope), ("full", first))}
        ppo = self.ppo(stepper, rows, old)
        epochs = []
        for theta in ppo:
            gain, kl = self.at(stepper, rows, denominator, theta)
            moved = (theta - old) / unit
            epochs.append(
                {
                    "x": float(moved @ first),
                    "y": float(moved @ second),
                    "length": float(moved.norm()),
                    "gain": gain - start,
                    "kl": kl,
                }
            )
        return {
            "delta": delta,
            "across": [float(ACROSS[0]), float(ACROSS[-1])],
            "up": [float(UP[0]), float(UP[-1])],
            "gains": [[float(f"{gain - start:.3g}") for gain in row] for row in values[..., 0]],
            "contours": [{"kl": kl, "lines": [np.round(line, 3).tolist() for line in lines.lines(kl)]} for kl in kls],
            "gradient": [float(slope @ first), float(slope @ second)],
            "curvature": curvature,
            "epochs": epochs,
        }

    def ppo(self, stepper: NaturalStepper, rows: Any, old: Tensor) -> list[Tensor]:
        """θ after each of PPO's epochs on the batch."""
        stepper.own.values.copy_(old)
        own = torch.nn.Parameter(old.clone())
        adam = torch.optim.Adam([own], RATE)
        count, thetas = len(rows.advantages), []
        shuffle = torch.Generator().manual_seed(1)
        for _ in range(EPOCHS):
            for part in torch.randperm(count, generator=shuffle).chunk(MINIBATCHES):
                stepper.own.zero()
                seen = stepper.passes.policy(map_tensors(lambda x, part=part: x[part], rows.inputs), rows.actions[part], None)
                ratio = importance_ratio(seen.log_probs, rows.old_log_probs[part])
                (-clipped_surrogate(ratio, rows.advantages[part], CLIP, CLIP).mean()).backward()
                own.grad = stepper.own.gradients.clone()
                adam.step()
                stepper.own.values.copy_(own.detach())
            thetas.append(own.detach().clone())
        return thetas


def main() -> None:
    recorder = Recorder()
    NaturalStepper._move = lambda self, *arguments: recorder(self, *arguments)  # type: ignore[method-assign]
    settings: dict[str, Any] = {"evaluation": {"episodes": 0}, "display": False, "rollout": {"environments": 8, "steps": 128}}
    settings["objective"] = {"trust_region": {"damping": DAMPING}}
    surefoot.train("CartPole-v1", "TRPO", steps=16_384, seed=1, **settings)
    about = f"CartPole-v1, TRPO with damping {DAMPING:g}, seed 1, update {recorder.found['update']}, {8 * 128:,} steps"
    ppo = f"PPO’s {EPOCHS} epochs on the same batch: Adam, rate {RATE:g}, {MINIBATCHES} minibatches, ε = {CLIP:g}"
    FILE.write_text(json.dumps({"about": about, "ppo": ppo, **recorder.found}) + "\n", "utf-8")


if __name__ == "__main__":
    main()
