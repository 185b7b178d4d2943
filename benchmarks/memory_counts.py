"""Count the passes that ``surefoot memory`` needs for the sizes whose counts are in the package.

    python benchmarks/memory_counts.py          writes src/surefoot/language/memory/counts.json; about a minute and a half

Run it after a change of what the passes of language models keep in memory, of the settings that the command tries, or of the
versions of torch, transformers or peft. Tests compare the file with new counts.
"""

import json
from typing import Any

from click.testing import CliRunner

from surefoot.cli.check import memory
from surefoot.language.memory.counts import SHIPPED, SIZES, counted_again, library_versions


def new_counts(size: str) -> dict[str, Any]:
    """All counts of ``surefoot memory SIZE``, by key."""
    with counted_again() as made:
        for words in ([size, "--json"], [size]):  # the tables for people show several GPUs too
            CliRunner().invoke(memory, words, catch_exceptions=False)
    return dict(sorted(made.items()))


def main() -> None:
    sizes = {}
    for size in SIZES:
        sizes[size] = new_counts(size)
        print(f"{size}: {len(sizes[size])} counts")
    lines = [
        f"  {json.dumps(size)}: {{\n" + ",\n".join(f"   {json.dumps(key)}: {json.dumps(count)}" for key, count in made.items())
        for size, made in sizes.items()
    ]
    text = f'{{\n "libraries": {json.dumps(library_versions())},\n "sizes": {{\n' + "\n  },\n".join(lines) + "\n  }\n }\n}\n"
    assert json.loads(text)["sizes"] == sizes
    SHIPPED.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
