"""How often chance alone would decide E11.1 of the ledger, if all trust regions but `none` were equally good.

    python benchmarks/equal_regions.py --experiments 1000        # under three minutes

Each experiment draws ten regions with the same mean on each task. Its noise is that of the runs of E11: the deviations of their
scores from their region's mean, drawn with replacement. `none`, which is far below in the runs, is left out.
"""

import argparse

import numpy as np
from claims import CONFIRMED, REFUTED, arrays, difference, verdict_of
from claims.ablation import E11, PAPER, normalised
from numpy.typing import NDArray


def decided_by_chance(scores: NDArray[np.float64], experiments: int, seed: int = 0) -> tuple[float, float]:
    """Shares of experiments that would confirm and refute that the first of equal regions is the best.

    scores [regions, tasks, seeds]: of real runs, for their means by task and their noise
    """
    regions, tasks, seeds = scores.shape
    means = scores.mean((0, 2))
    # the deviations from a mean of n are sqrt((n − 1) / n) too small
    noise = (scores - scores.mean(-1, keepdims=True)) * np.sqrt(seeds / (seeds - 1))
    pools = noise.transpose(1, 0, 2).reshape(tasks, -1)
    random = np.random.default_rng(seed)
    verdicts = []
    for _ in range(experiments):
        drawn = np.stack([mean + random.choice(pool, (regions, seeds)) for mean, pool in zip(means, pools, strict=True)], 1)
        drawn /= drawn.mean(-1).max(0)[None, :, None]
        first, *others = drawn.tolist()
        verdicts.append(verdict_of([difference("", first, other) for other in others]))
    return verdicts.count(CONFIRMED) / experiments, verdicts.count(REFUTED) / experiments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=1000)
    experiments = parser.parse_args().experiments
    if experiments < 1:
        parser.error(f"--experiments: {experiments}; use 1 or more")
    results = E11.results()
    scores = np.stack([arrays(normalised(results, region)) for region in PAPER if region != "none"])
    confirmed, refuted = decided_by_chance(scores, experiments)
    print(f"of experiments with equal regions, chance confirms E11.1 in {confirmed:.1%} and refutes it in {refuted:.1%}")


if __name__ == "__main__":
    main()
