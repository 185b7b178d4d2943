"""Tasks of the package ``reasoning-gym`` by name: ``reasoning_gym/spell_backward``. Those with one right answer.

The others judge a response by a program of their own, and some of these evaluate what the response says: not in this process.
"""

from typing import Any

from surefoot.core.seeding import derived_seed
from surefoot.errors import SurefootError, did_you_mean, missing_extra
from surefoot.language.tasks.task import HELD_OUT, Row

PREFIX = "reasoning_gym/"


def rows(name: str, count: int, seed: int, *, test: bool) -> list[Row]:
    """``count`` problems ``{"prompt", "answer", "task"}``, each prompt once; training and test share no prompt.

    Raises SurefootError where the package is missing, for a name that it does not have or whose answers need a program to judge
    them, and where there are not so many problems.
    """
    try:
        import reasoning_gym as package
        from reasoning_gym.dataset import ProceduralDataset
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise missing_extra("reasoning-gym", "reasoning-gym", f"task {name}") from None
    inner = name.removeprefix(PREFIX)
    if inner not in DATASETS:
        raise SurefootError(f"task={name!r}: reasoning-gym has no such task{did_you_mean(inner, DATASETS)}")
    if DATASETS[inner][0].score_answer is not ProceduralDataset.score_answer:
        raise SurefootError(f"task={name!r}: has no one right answer but a judge that may evaluate a response; take another")
    share = HELD_OUT if test else 2
    problems: Any = package.create_dataset(inner, seed=seed, size=max(count, 10) * share * 4)
    found: dict[str, Row] = {}
    for problem in problems:
        prompt = f"{problem['question']}\n"
        if (derived_seed("held out", prompt) % HELD_OUT == 0) == test:
            found[prompt] = {"prompt": prompt, "answer": str(problem["answer"]).strip(), "task": name}
        if len(found) == count:
            return list(found.values())
    raise SurefootError(f"rows={count}: {name} gave {len(found)} different problems among {len(problems)}; ask for fewer")
