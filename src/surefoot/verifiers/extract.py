"""The part of a response that is meant."""

import re

_FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```", re.M | re.S)


def fenced(response: str) -> str:
    """The last fenced block of a response; all of it where there is none."""
    blocks: list[str] = _FENCED.findall(response)
    return blocks[-1] if blocks else response


def following(text: str, marker: str) -> str | None:
    """What comes after the last marker, all of it for ""; None where there is no marker."""
    if not marker:
        return text
    _, found, rest = text.rpartition(marker)
    return rest if found else None
