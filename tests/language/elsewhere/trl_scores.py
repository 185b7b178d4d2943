"""Train with TRL against a reward model and print its scores; needs a Python with TRL.

    python trl_scores.py TRAINER POLICY REWARD PROMPTS OUT

TRAINER  grpo or rloo
PROMPTS  a JSON list of prompts, text or messages
OUT      the output folder of the trainer

The last line of output is JSON: ids, mask and scores of each reward model call, and the mean reward logged at each step.
"""

import json
import sys
from typing import Any

import trl
from datasets import Dataset


def main(name: str, policy: str, reward: str, prompts: str, out: str) -> None:
    trainer_class, config_class = {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}[name]
    settings = config_class(
        output_dir=out,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=6,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=1,
    )
    rows = Dataset.from_list([{"prompt": prompt} for prompt in json.loads(prompts)])
    trainer = trainer_class(model=policy, reward_funcs=reward, args=settings, train_dataset=rows)
    calls: list[dict[str, Any]] = []

    def record(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        ids, mask, scores = kwargs["input_ids"], kwargs["attention_mask"], output.logits[:, 0]
        calls.append({"ids": ids.tolist(), "mask": mask.tolist(), "scores": scores.tolist()})

    trainer.reward_funcs[0].register_forward_hook(record, with_kwargs=True)
    trainer.train()
    means = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(json.dumps({"version": trl.__version__, "calls": calls, "means": means}))


if __name__ == "__main__":
    main(*sys.argv[1:])
