"""What a run publishes while it goes on, and who may listen."""

from typing import Any

Sample = dict[str, Any]
"""``prompt`` and ``response``, ``reward`` and whatever else is known: numbers, or None"""
