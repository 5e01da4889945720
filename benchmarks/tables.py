"""Print a table with rich if it is installed, otherwise as aligned text."""

from collections.abc import Sequence


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header; the first column is text, the others are numbers."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        print(plain(title, header, rows))
        return
    console = Console(soft_wrap=False)
    if not console.is_terminal:  # a file or a pipe: keep the lines whole
        print(plain(title, header, rows))
        return
    table = Table(*header, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console.print(table)


def plain(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as text; a column is as wide as its widest cell or heading word."""
    heads = [head.split() for head in header]
    widths = [
        max([len(row[i]) for row in rows] + [len(word) for word in words]) for i, words in enumerate(heads)
    ]
    heads[0] = [header[0]]
    lines = [title]
    for level in range(max(map(len, heads))):
        words = [head[level] if level < len(head) else "" for head in heads]
        lines.append(_line(words, widths))
    lines.append("  ".join("-" * width for width in widths))
    lines += [_line(row, widths) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join([cells[0].ljust(len(first)), *rest])
