"""Tables for notebooks, as HTML in which every text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

MAX_ROWS = 200


def html_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with a title.

    Args:
        title: Above the table.
        columns: Names of the columns.
        rows: Texts of each row; of more than 200 rows the first are shown.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = [
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows[:MAX_ROWS]
    ]
    if len(rows) > MAX_ROWS:
        more = f"... and {len(rows) - MAX_ROWS:,} more"
        lines.append(f'<tr><td colspan="{len(columns)}">{more}</td></tr>')
    return (
        f"<div><strong>{escape(title)}</strong>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        "</div>"
    )
