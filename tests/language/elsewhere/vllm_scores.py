"""Score texts with a reward model in vLLM; needs a Python with vLLM.

    python vllm_scores.py REWARD TEXTS OFFSET

TEXTS   a JSON list of lists of token ids
OFFSET  a number that the pooler subtracts from the scores

The last line of output is JSON: the version and the scores.
"""

import json
import sys

import vllm
from vllm.config import PoolerConfig


def main(reward: str, texts: str, offset: str) -> None:
    pooler = PoolerConfig(use_activation=False, logit_mean=float(offset))
    model = vllm.LLM(
        reward, runner="pooling", dtype="float32", max_model_len=64, enforce_eager=True, pooler_config=pooler, seed=0
    )
    outputs = model.classify([{"prompt_token_ids": ids} for ids in json.loads(texts)], use_tqdm=False)
    print(json.dumps({"version": vllm.__version__, "scores": [output.outputs.probs[0] for output in outputs]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
