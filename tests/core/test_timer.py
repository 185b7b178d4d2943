"""Where the seconds of a run go: sections in sections, and the wait for the device within what is measured."""

import pytest

from surefoot.core.timer import Timer


def test_a_section_has_its_place_its_calls_and_the_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = [0.0], list[str]()
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    class Observer:
        def enter(self, path: tuple[str, ...]) -> None:
            seen.append(f"+{path[-1]}")

        def leave(self, path: tuple[str, ...]) -> None:
            seen.append(f"-{path[-1]}")

    timer = Timer()
    timer.observer = Observer()
    timer.synchronise = lambda: clock.__setitem__(0, clock[0] + 2.0)
    for detailed in (False, True):
        timer.detailed = detailed
        with timer.section("learning") as span, timer.detail("forward"):
            clock[0] += 1.0
            assert timer.timed("scoring", lambda x, y: x - y)(5, y=3) == 2
        assert span.seconds == (7.0 if detailed else 3.0)
    assert timer.seconds == {("learning",): 10.0, ("learning", "forward"): 5.0, ("learning", "forward", "scoring"): 2.0}
    assert timer.calls == {("learning",): 2, ("learning", "forward"): 1, ("learning", "forward", "scoring"): 1}
    assert seen == ["+learning", "-learning", "+learning", "+forward", "+scoring", "-scoring", "-forward", "-learning"]
    with pytest.raises(KeyError), timer.section("broken"):
        raise KeyError
    with timer.section("after"):
        pass
    assert ("after",) in timer.seconds, "an error ends its section too"
