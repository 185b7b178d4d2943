"""Several attempts at a problem: the counts match the written responses."""

import json
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.errors import SurefootError
from surefoot.language.analysis.accuracy import Attempts, majority, measure_attempts, parse_ks
from surefoot.language.data.rows import write_rows
from surefoot.language.online.world import LanguageWorld
from surefoot.language.rewards.terms import FunctionReward

from .tiny import fields_of, set_probabilities, world_of

WANTED = ("a", "b", "a", "", "bb", "zz")


def recipe(folder: Path, where: Path, **reward: Any) -> dict[str, Any]:
    """Problems whose answers a model that says a, b or nothing more gives now and then; the last never."""
    write_rows(where / "rows.jsonl", [{"prompt": f"{row} is ", "answer": answer} for row, answer in enumerate(WANTED)])
    rows, value = str(where / "rows.jsonl"), {} if reward else {"missing_eos": "penalty", "missing_eos_value": 0.0}
    table = {
        "steps": 8,
        "data": {"train": rows, "held_out": rows, "max_length": 16},
        "sampling": {"prompts": 8, "max_tokens": 3},
        "reward": {"terms": ["surefoot.verifiers:exact"], **value, **reward},
        "evaluation": {"rows": 6},
    }
    return fields_of(folder, rows, "", **table)


def made(folder: Path, where: Path, **reward: Any) -> tuple[LanguageWorld, list[list[str]]]:
    """A world whose policy says a (0.5), b (0.3) or ends (0.2), and all responses that its reward was asked about."""
    world = world_of(recipe(folder, where, **reward))
    letters = [world.tokens.encode_prompt(letter)[-1] for letter in "ab"]
    set_probabilities(world.policy.model, [*letters, world.tokens.eos_id], (0.5, 0.3, 0.2))
    requests: list[list[str]] = []
    verifier = world.reward

    def watching(prompts: Any, responses: Any, columns: Any, tokens: Any = None) -> Any:
        requests.append(list(responses))
        return verifier(prompts, responses, columns)

    world.reward = watching
    return world, requests


def test_each_number_follows_from_the_written_responses(folders: dict[str, Path], tmp_path: Path) -> None:
    world, requests = made(folders["llama"], tmp_path, missing_eos="none")
    report = measure_attempts(world, Attempts(4, (1, 4)))
    assert [len(responses) for responses in requests] == [2, 8] * 3, "no more responses at a time than training samples"
    greedy = [response for responses in requests[::2] for response in responses]
    drawn = [response for responses in requests[1::2] for response in responses]
    groups = [drawn[row * 4 : row * 4 + 4] for row in range(6)]
    assert greedy == ["aaa"] * 6
    right = [sum(response == wanted for response in group) for group, wanted in zip(groups, WANTED, strict=True)]
    assert 0 < sum(right) < 24
    assert report["greedy_accuracy"] == 0
    assert report["sampled_accuracy"] == report["pass_at"]["1"] == sum(right) / 24
    assert report["pass_at"]["4"] == pytest.approx(sum(count > 0 for count in right) / 6)
    votes = [max(group, key=lambda text: (group.count(text), -group.index(text))) for group in groups]
    assert report["majority_accuracy"] == sum(vote == wanted for vote, wanted in zip(votes, WANTED, strict=True)) / 6
    assert report["without_score"] == 0
    assert measure_attempts(world, Attempts(4, (1, 4))) == report, "the same attempts again"


def test_greedy_conversations_have_seeds_of_their_rows_however_many_are_held_at_a_time(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Environments draw from them: the same few seeds for every part would be the same few games."""
    world, _ = made(folders["llama"], tmp_path)
    answer, seen = world.collector.respond, dict[int, list[int]]()
    for samples in (1, 4, 8):
        results = seen.setdefault(samples, [])

        def watching(prompts: Any, seeds: Any, count: int = 1, greedy: bool = False, results: Any = results) -> Any:
            results.extend(seeds if greedy else ())
            return answer(prompts, seeds, count, greedy)

        world.collector.respond = watching
        measure_attempts(world, Attempts(samples))
    assert len(set(seen[1])) == 6
    assert seen[1] == seen[4] == seen[8]


def test_a_cut_response_is_wrong_and_has_no_vote_where_the_recipe_punishes_it(folders: dict[str, Path], tmp_path: Path) -> None:
    results = {}
    for treatment in ("none", "penalty"):
        world, _ = made(folders["llama"], tmp_path, missing_eos=treatment)
        world.reward = FunctionReward(lambda responses: [float(len(text) == 3) for text in responses])
        results[treatment] = measure_attempts(world, Attempts(4))
    assert results["none"]["greedy_accuracy"] == 1, "three letters are as many tokens as there may be"
    assert results["none"]["sampled_accuracy"] > 0
    assert results["penalty"]["greedy_accuracy"] == results["penalty"]["sampled_accuracy"] == 0
    assert results["penalty"]["majority_accuracy"] == 0


def test_a_reward_between_needs_a_threshold_and_missing_scores_are_wrong(folders: dict[str, Path], tmp_path: Path) -> None:
    world, _ = made(folders["llama"], tmp_path, missing_eos="none")
    world.reward = FunctionReward(lambda responses: [len(text) / 4 for text in responses])
    with pytest.raises(SurefootError, match=r"the reward of a response is 0.75, neither 0 nor 1; set --threshold T"):
        measure_attempts(world, Attempts(4))
    assert measure_attempts(world, Attempts(4, threshold=0.75))["greedy_accuracy"] == 1
    assert measure_attempts(world, Attempts(4, threshold=0.8))["greedy_accuracy"] == 0
    world.reward = FunctionReward(lambda responses: [None] * len(responses), tolerated=1.0)
    silent = measure_attempts(world, Attempts(2, threshold=0.0))
    assert (silent["greedy_accuracy"], silent["without_score"]) == (0, 1)


def test_a_vote_goes_to_the_text_that_most_give_and_a_tie_to_the_first() -> None:
    assert majority(["b", "a", "a"]) == 1
    assert majority(["b", "a", "c", "a", "b"]) == 0
    assert majority([" 4  apples", "5", "4 apples "]) == 0
    assert majority([None, None, "x"]) == 2
    assert majority(["4", "4.0", "5", "5"]) == 2, "by text alone"
    assert majority([None, None]) is None


def test_pass_at_powers_of_two_and_n_by_default() -> None:
    assert Attempts(12).all_ks == [1, 2, 4, 8, 12]
    assert Attempts(1).all_ks == [1]
    assert Attempts(8, parse_ks("8, 3,3")).all_ks == [3, 8]


def test_evaluate_prints_attempts_of_the_trained_model_and_its_start(command: Any, folders: dict[str, Path]) -> None:
    surefoot.train("language", run_dir=Path("run"), **recipe(folders["llama"], Path.cwd()))
    words = ("evaluate", "run", "--samples", "2", "--k", "1,2", "--after", "#")
    report = json.loads(command(*words, "--json")[1])["attempts"]
    assert report["samples"] == 2
    for side in ("start", "trained"):
        assert report[side]["pass_at"]["1"] == report[side]["sampled_accuracy"]
        assert set(report[side]["pass_at"]) == {"1", "2"}
        assert report[side]["majority_accuracy"] == 0, "no response has an answer after #"
    code, out, _ = command(*words)
    assert code == 0
    for line in ("greedy accuracy", "sampled accuracy", "pass@1", "pass@2", "majority of 2"):
        assert sum(shown.startswith(line) for shown in out.splitlines()) == 1


def test_a_vote_reads_what_follows_the_marker(folders: dict[str, Path], tmp_path: Path) -> None:
    world, requests = made(folders["llama"], tmp_path, missing_eos="none")
    measure_attempts(world, Attempts(1))
    drawn = [response for responses in requests[1::2] for response in responses]
    world.reward = FunctionReward(lambda responses: [float(text.endswith("a")) for text in responses])
    actual = measure_attempts(world, Attempts(1, after="b"))["majority_accuracy"]
    assert actual == sum("b" in text and text.endswith("a") for text in drawn) / 6
    assert actual != sum(text.endswith("a") for text in drawn) / 6
