"""Choice of a few rows from all over a batch, for checks that compare rows at once and in parts."""

from __future__ import annotations

# pyright: strict


def spread_rows(rows: int, count: int, turn: int, turns: int) -> list[int]:
    """Return `count` rows at equal distances, other rows in each turn.

    The list begins at another row in each turn. So if a batch is so small that every turn takes all of its
    rows, the first part of the list still has other rows.

    Args:
        rows: the rows of the batch.
        count: how many to choose, at most `rows`.
        turn: the turn, from 0 on.
        turns: the number of turns.

    Examples:
        >>> spread_rows(100, 4, turn=0, turns=2), spread_rows(100, 4, turn=1, turns=2)
        ([0, 25, 50, 75], [37, 62, 87, 12])
    """
    chosen = [(number * turns + turn) * rows // (count * turns) for number in range(count)]
    return chosen[turn % count :] + chosen[: turn % count]
