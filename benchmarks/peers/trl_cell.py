"""Train one cell of TRL for ``benchmarks/language_speed.py`` and write its rate and its last scores as JSON.

Run with the Python of an environment with TRL, not Surefoot's: TRL 1.12.0 for PPO (its last version that has it), 1.16.0 for
the others. WORK is the folder that ``language_speed.py`` makes:

    python benchmarks/peers/trl_cell.py --what grpo --work WORK --iterations 6 --out cell.json

The settings are those of ``SETTINGS`` in ``language_speed.py``, in TRL's names. A first training of one iteration warms up.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

COMMON: dict[str, Any] = {
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}


class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """The times at the start and after every step, and the logs."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.logs: list[dict[str, float]] = []

    def _now(self) -> None:
        self.times.append((time.perf_counter(), time.process_time()))

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._now()

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        self.logs.append(logs or {})


def rows(work: Path, name: str) -> Dataset:
    """A file of rows."""
    return Dataset.from_list([json.loads(line) for line in (work / f"{name}.jsonl").read_text().splitlines()])


def distinct(completions: list[str], **_: Any) -> list[float]:
    """The reward of GRPO: distinct characters in a response."""
    return [float(len(set(text))) for text in completions]


def trainer_of(what: str, work: Path, iterations: int, seed: int, out: str) -> Any:
    """TRL's trainer for this many iterations."""
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    common = {**COMMON, "output_dir": out, "seed": seed}
    if what == "ppo":
        from trl.experimental.ppo import PPOConfig, PPOTrainer

        tokenizer.padding_side = "left"
        prompts = rows(work, "prompts")
        encoded = prompts.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns=["prompt"])
        scorer, critic = (
            AutoModelForSequenceClassification.from_pretrained(work / "reward", num_labels=1, dtype=torch.float32)
            for _ in range(2)
        )
        config = PPOConfig(
            **common,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=1,
            total_episodes=64 * iterations,
            num_ppo_epochs=4,
            num_mini_batches=1,
            num_sample_generations=0,
            response_length=48,
            stop_token="eos",
            temperature=1.0,
            kl_coef=0.05,
        )
        reference = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
        return PPOTrainer(
            config,
            processing_class=tokenizer,
            model=model,
            ref_model=reference,
            reward_model=scorer,
            value_model=critic,
            train_dataset=encoded,
            eval_dataset=encoded.select(range(8)),
        )
    if what == "grpo":
        config = trl.GRPOConfig(
            **common,
            per_device_train_batch_size=64,
            num_generations=8,
            steps_per_generation=1,
            num_iterations=1,
            max_completion_length=48,
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            max_steps=iterations,
        )
        return trl.GRPOTrainer(model, distinct, args=config, train_dataset=rows(work, "prompts"), processing_class=tokenizer)
    batch = {"per_device_train_batch_size": 32, "max_steps": iterations}
    if what == "sft":
        config = trl.SFTConfig(**common, **batch, max_length=128, packing=False)
        return trl.SFTTrainer(model, args=config, train_dataset=rows(work, "texts"), processing_class=tokenizer)
    config = trl.DPOConfig(**common, **batch, max_length=128, beta=0.1)
    return trl.DPOTrainer(model, args=config, train_dataset=rows(work, "pairs"), processing_class=tokenizer)


SCORES = {"ppo": "objective/scores", "grpo": "reward", "sft": "loss", "dpo": "loss"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=list(SCORES), required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainer_of(args.what, args.work, 1, args.seed, str(args.out.with_suffix(".d"))).train()
    trainer = trainer_of(args.what, args.work, args.iterations, args.seed, str(args.out.with_suffix(".d")))
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    scores = [logs[SCORES[args.what]] for logs in clock.logs if SCORES[args.what] in logs]
    wall, cpu = (after - before for after, before in zip(clock.times[-1], clock.times[0], strict=True))
    result = {"version": trl.__version__, "seconds": wall, "cpu_seconds": cpu, "scores": scores}
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
