"""The control of ``surefoot demo tools``: the same model, rows and updates without the tool, so that it must multiply itself.

    python benchmarks/tools.py SEED

SFT on right answers, then PPO; writes control-SEED/ and prints the share of right answers to the test problems of the demo.
"""

import sys
from pathlib import Path

import surefoot
from surefoot.demos.verifier import attempts_at
from surefoot.language import tasks
from surefoot.language.data.rows import write_rows


def main(seed: int) -> None:
    folder = Path(f"control-{seed}")
    folder.mkdir()
    right = tasks.rows("calculator", 16_000, seed)
    asked = [{"role": "user", "content": row["prompt"]} for row in right]
    answered = [[question, {"role": "assistant", "content": row["answer"]}] for question, row in zip(asked, right, strict=True)]
    write_rows(folder / "direct.jsonl", ({"messages": messages} for messages in answered))
    held_out = tasks.rows("calculator", 384, seed, test=True)
    parts = {"problems": tasks.rows("calculator", 4_096, seed + 1), "validation": held_out[:128], "test": held_out[128:]}
    for name, rows in parts.items():
        messages = ({"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows)
        write_rows(folder / f"{name}.jsonl", messages)
    data = {"train": str(folder / "problems.jsonl"), "held_out": str(folder / "validation.jsonl")}
    surefoot.train("calculator_sft", run_dir=folder / "sft", seed=seed, data={"train": str(folder / "direct.jsonl")})
    online = {"model": str(folder / "sft"), "steps": 4_096, "turns": {"tools": []}, "data": data}
    surefoot.train("calculator", run_dir=folder / "ppo", seed=seed, **online)
    results = attempts_at(folder / "ppo", folder / "test.jsonl")
    for name in ("start", "trained"):
        result = results[name]
        print(f"{name}: greedy {result['greedy_accuracy']:.1%}, sampled {result['sampled_accuracy']:.1%}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
