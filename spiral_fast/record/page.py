"""One HTML page that needs no network. Everything shown is escaped: model output is untrusted."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1280px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: .6em 0; }
td, th { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: left; font-variant-numeric: tabular-nums; }
.charts { display: flex; flex-wrap: wrap; gap: 1em; } .charts svg { width: 600px; max-width: 100%; height: auto; }
.note { background: #fff3cd; padding: .6em 1em; border-left: 4px solid #d39e00; }
pre { background: #f6f6f6; padding: .7em; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def page(title: str, body: str) -> str:
    """The whole document; `body` is HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def gallery(pictures: Iterable[str]) -> str:
    """SVG elements side by side."""
    pictures = list(pictures)
    return f'<div class="charts">{"".join(pictures)}</div>' if pictures else ""


def table(head: list[str], rows: list[list[str]]) -> str:
    cells = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    cells += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"
