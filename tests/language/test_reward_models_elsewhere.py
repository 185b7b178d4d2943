"""TRL trainers and vLLM load reward models saved by Surefoot and compute the same scores.

They run in separate environments; set SUREFOOT_TRL_PYTHON and SUREFOOT_VLLM_PYTHON to the paths of their interpreters.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.language.data.batches import right_padded
from surefoot.language.models.reward_model import RewardModel, load_reward_model, new_reward_model

from . import tiny

SCRIPTS = Path(__file__).parent / "elsewhere"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
PROMPTS = ["one: ", "two: ", "a longer prompt: ", "x: "]
PROGRAMS = {"SUREFOOT_TRL_PYTHON": "TRL", "SUREFOOT_VLLM_PYTHON": "vLLM"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def printed(variable: str, script: str, *words: str, **settings: str) -> Any:
    """Run a script in another environment and parse the last line of its output as JSON."""
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python with {PROGRAMS[variable]}")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **settings}
    done = subprocess.run([python, SCRIPTS / script, *words], env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def written(folder: Path, **shape: Any) -> RewardModel:
    """Save and reload a chat reward model with a non-trivial scale and offset."""
    model, tokenizer = tiny.model("llama", **shape), tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    scorer = new_reward_model(model, 3, tokenizer)
    scorer.standardise(torch.tensor([-1.0, 0.5, 3.5]))
    scorer.save(folder)
    return load_reward_model(folder)


@pytest.mark.parametrize(("trainer", "chat"), [("grpo", True), ("rloo", False)])
def test_trl_trainers_compute_the_same_scores(trainer: str, chat: bool, tmp_path: Path) -> None:
    ours = written(tmp_path / "reward")
    policy = tiny.write_folder(tmp_path / "policy", "llama", seed=2)
    if chat:
        (policy / "chat_template.jinja").write_text(TEMPLATE)
    prompts = [[{"role": "user", "content": text}] if chat else text for text in PROMPTS]
    words = (trainer, str(policy), str(tmp_path / "reward"), json.dumps(prompts), str(tmp_path / "out"))
    theirs = printed("SUREFOOT_TRL_PYTHON", "trl_scores.py", *words)
    assert len(theirs["calls"]) == len(theirs["means"]) == 3
    for call, mean in zip(theirs["calls"], theirs["means"], strict=True):
        ids, mask, scores = (torch.tensor(call[name]) for name in ("ids", "mask", "scores"))
        with torch.no_grad():
            torch.testing.assert_close(ours.logits(ids, mask.bool()), scores, atol=1e-5, rtol=1e-5)
        assert mean == pytest.approx(float(scores.mean()), abs=1e-4)
        last = ids.gather(1, mask.sum(-1, keepdim=True) - 1)
        assert bool((last == 1).all()) == chat, "the template ends messages with EOS; plain text has none"
    assert float(scores.std()) > 0.01, "constant scores would match trivially"


@pytest.mark.parametrize("standardised", [False, True])
def test_vllm_computes_the_same_scores(standardised: bool, tmp_path: Path) -> None:
    """Also the standardised rewards of runs, if its pooler subtracts the mean score."""
    ours = written(tmp_path / "reward", hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    texts = [[*ours.tokenizer(text)["input_ids"], 1] for text in PROMPTS]  # type: ignore[misc]
    with torch.no_grad():
        scores = (ours if standardised else ours.logits)(*right_padded(texts, 0))
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    words = (str(tmp_path / "reward"), json.dumps(texts), str(ours.offset if standardised else 0.0))
    theirs = printed("SUREFOOT_VLLM_PYTHON", "vllm_scores.py", *words, **quiet, **cpu)
    torch.testing.assert_close(torch.tensor(theirs["scores"]), scores, atol=1e-5, rtol=1e-5)
    assert float(scores.std()) > 0.1, "constant scores would match trivially"
