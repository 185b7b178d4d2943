"""Memory and time of the loss over a large vocabulary: log-probabilities and entropy, forward and backward, three ways.

    python benchmarks/vocabulary.py --rows 512 --vocabulary 150000 --width 512

"naive" holds all logits, "recomputed" computes the logits of a chunk again by ``torch.utils.checkpoint``, "linear" is what
``surefoot.functional.chunked_likelihood`` does with an ``nn.Linear``. Each runs in a process of its own, ``--rounds`` times by
turns. Memory is the peak of the process above what it had before the pass. Without ``--entropy`` the entropy gets no gradient.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

WAYS = ("naive", "recomputed", "linear")


def measured(way: str, rows: int, vocabulary: int, width: int, bf16: bool, entropy: bool) -> dict[str, float]:
    """Seconds of CPU time, peak memory in MB and the norm of the gradient of one pass."""
    import torch

    from surefoot.functional import chunked_likelihood
    from surefoot.language.models.policy import CHUNK

    torch.set_num_threads(1)
    torch.manual_seed(1)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    hidden, tokens = torch.randn(rows, width, requires_grad=True), torch.randint(vocabulary, (rows,))
    of = head if way == "linear" else lambda x: head(x)
    chunk = rows if way == "naive" else max(1, CHUNK // (4 * vocabulary))
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        log_probs, entropies = chunked_likelihood(hidden, tokens, of, 1.0, chunk)
    (log_probs.mean() + (entropies.mean() if entropy else 0)).backward()
    seconds = time.process_time() - started
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert head.weight.grad is not None
    return {"seconds": seconds, "megabytes": (after - before) / 1e3, "norm": float(head.weight.grad.norm())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bf16", action="store_true", help="matrix products in bfloat16 (autocast)")
    parser.add_argument("--entropy", action="store_true", help="the entropy gets a gradient too")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measured(args.way, args.rows, args.vocabulary, args.width, args.bf16, args.entropy)))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            found[way].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print("| way | peak, MB | CPU time, s | norm of the gradient |")
    print("|---|---|---|---|")
    for way, each in found.items():
        peak, norm = (statistics.median(one[name] for one in each) for name in ("megabytes", "norm"))
        spent = [one["seconds"] for one in each]
        print(f"| {way} | {peak:,.0f} | {statistics.median(spent):.2f} ({min(spent):.2f}–{max(spent):.2f}) | {norm:.6g} |")


if __name__ == "__main__":
    main()
