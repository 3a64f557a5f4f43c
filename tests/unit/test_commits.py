"""Which engine ranks owe a commit, and since when."""

from __future__ import annotations

from weft.runtime.controller.commits import Commits


def test_the_rank_told_last_counts():
    commits = Commits()
    assert not commits.owes_after(0.0)
    commits.owe([0, 1], version=7, since=100.0)
    commits.owe([0], version=8, since=200.0)  # told again: it moves to the end
    assert commits.owes_after(200.0)
    assert commits.owing_since(200.0) == {1: 7}
    assert commits.done(0, 8)
    assert not commits.owes_after(100.5)
    assert commits.owes_after(100.0)
