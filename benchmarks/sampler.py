"""Tokens per second of the sampler and of ``model.generate``: the same model, prompts and lengths, alternately.

    python benchmarks/sampler.py --rounds 5
    python benchmarks/sampler.py --family llama gpt2 --rows 512 --samples 8 --clock cpu

Weights are random and no response ends before the limit, so all do the same work. Only the sampler also computes
log-probabilities. A second test lets 3 % of the vocabulary end a response: ``generate`` continues with finished rows
until the last row ends, and only tokens of responses are counted. Run it on an otherwise idle machine. Elsewhere
only the ratios within a round are meaningful; ``--clock cpu`` counts CPU time instead of wall-clock time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from surefoot.compare.statistics import markdown_table
from surefoot.language.sampling.engines import Request
from surefoot.language.sampling.sampler import sample

FAMILIES = ("llama", "qwen2", "gpt2", "gemma")


def built(family: str, width: int, layers: int, heads: int, vocabulary: int, context: int) -> Any:
    """A model of the family with random weights; the default is the shape of ``pocket``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if family == "gpt2":
        shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": context, "bos_token_id": None}
    else:
        shape = {
            "hidden_size": width,
            "intermediate_size": width * 11 // 4,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": width // heads,
            "max_position_embeddings": context,
        }
    config = AutoConfig.for_model(family, vocab_size=vocabulary, eos_token_id=None, pad_token_id=0, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(config).eval()


def contestants(model: Any, options: argparse.Namespace, eos: list[int]) -> dict[str, Callable[[], int]]:
    """The functions to time: each samples the responses once and returns their number of tokens."""
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(1, options.vocabulary, (options.rows // options.samples, options.prompt), generator=drawn)
    seeds = range(options.rows)

    def ours(path: Any) -> Callable[[], int]:
        def run() -> int:
            result = sample(model, Request(ids.tolist(), seeds, options.tokens, eos, 0, samples=options.samples), path=path)
            return int(result.mask.sum())

        return run

    def theirs() -> int:
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            num_return_sequences=options.samples,
            max_new_tokens=options.tokens,
            eos_token_id=eos or None,
            pad_token_id=0,
        )
        responses = result[:, options.prompt :]
        ends = torch.isin(responses, torch.tensor(eos, dtype=torch.long))
        return int((ends.cumsum(-1) - ends.long() == 0).sum())  # up to and including the first end

    return {**{f"surefoot, {path}": ours(path) for path in options.paths}, "model.generate": theirs}


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def measured(runs: dict[str, Callable[[], int]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Tokens per second of each sampler in each round, after one warm-up round."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for now in range(rounds + 1):
        for name, run in runs.items():
            started = clock()
            tokens = run()
            if now:
                speeds[name].append(tokens / (clock() - started))
    return speeds


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=["llama"], choices=FAMILIES)
    for name, default in {
        "width": 128,
        "layers": 4,
        "heads": 4,
        "vocabulary": 100,
        "rows": 64,
        "samples": 1,
        "prompt": 16,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--paths", nargs="+", default=["packed", "cached"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for family in options.family:
        model = built(family, options.width, options.layers, options.heads, options.vocabulary, options.prompt + options.tokens)
        size = sum(parameter.numel() for parameter in model.parameters())
        for ending, eos in (
            ("none ends early", []),
            ("each token ends 3 %", list(range(1, 1 + options.vocabulary * 3 // 100))),
        ):
            speeds = measured(contestants(model, options, eos), options.rounds, CLOCKS[options.clock])
            for name, each in speeds.items():
                ratios = [a / b for a, b in zip(each, speeds["model.generate"], strict=True)]
                rows.append(
                    [
                        f"{family}, {size / 1e6:.2f} M",
                        ending,
                        name,
                        f"{max(each):,.0f}",
                        f"{statistics.median(each):,.0f}",
                        f"{statistics.median(ratios):.1f}",
                    ]
                )
    shape = f"{options.rows} rows ({options.samples} per prompt) x ({options.prompt} + {options.tokens}) tokens"
    print(f"{shape}, {options.threads} thread(s), {options.clock} time", end="\n\n")
    print(markdown_table(["model", "responses", "sampler", "tokens/s, best", "median", "times generate"], rows))


if __name__ == "__main__":
    main()
