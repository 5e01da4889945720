"""Choice of a few rows spread over a batch, for checks that compare one call with calls on parts."""

from __future__ import annotations

# pyright: strict


def spread_rows(rows: int, count: int, turn: int, turns: int) -> list[int]:
    """Return `count` rows at equal distances; each turn returns different rows.

    In a small batch every turn may return all rows. The list then begins at a different row in each turn, so
    the first part of the list still differs.

    Examples:
        >>> spread_rows(100, 4, turn=0, turns=2), spread_rows(100, 4, turn=1, turns=2)
        ([0, 25, 50, 75], [37, 62, 87, 12])
    """
    chosen = [(number * turns + turn) * rows // (count * turns) for number in range(count)]
    return chosen[turn % count :] + chosen[: turn % count]
