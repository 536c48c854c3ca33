"""The reference tables in README.md and docs/errors.md, made from the source.

``python -m proxy.reference`` (``make docs``) rewrites what stands between the markers of a table.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from proxy.errors import TABLE, AdapterRefused
from proxy.settings import OLD_NAMES, OptionInfo, options

ROOT = Path(__file__).parents[1]


def settings_table() -> str:
    """One row for each option of ``rollmux serve`` and ``rollmux run``."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for info in options():
        flag = _escape(f"`{info.flag}{_metavar(info)}`")  # a bar ends a cell, even in code
        if info.field == "replicas":
            flag += f", `{info.env}`"
        default = info.default_text
        if info.option.unit:
            default += f" {info.option.unit}" if info.default is not None else ""
        rows.append(f"| {flag} | {default} | {_escape(info.option.help)} |")
    return "\n".join(rows)


def old_names_table() -> str:
    """One row for each environment name of the reference script."""
    flags = {info.field: info for info in options()}
    rows = ["| name | here |", "|---|---|"]
    rows += [f"| `{old}` | `{flags[name].env}` |" for old, name in OLD_NAMES.items()]
    return "\n".join(rows)


def errors_table() -> str:
    """One row for each error that the daemon answers with."""
    rows = ["| status | `x-rollmux-error` | what it means | why this status |", "|---|---|---|---|"]
    for leaf, row in TABLE.items():
        status = "the replica's" if leaf is AdapterRefused else str(row.status)
        meaning = " ".join((inspect.getdoc(leaf) or "").replace("``", "`").split())
        cells = [status, f"`{row.code}`", _escape(meaning), _escape(row.relies_on)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


TABLES = {
    "README.md": {"settings": settings_table, "old-names": old_names_table},
    "docs/errors.md": {"errors": errors_table},
}
"""Which page has which tables."""


def rendered(page: str, text: str) -> str:
    """``text`` of a page with its tables as the source has them now.

    :raises ValueError: a marker is missing.
    """
    for name, table in TABLES[page].items():
        begin, end = f"<!-- {name}: made by `make docs` -->\n", f"<!-- end of {name} -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"{page} has no markers for the table {name!r}")
        text = f"{before}{begin}{table()}\n{end}{after}"
    return text


def _metavar(info: OptionInfo) -> str:
    return f" {info.option.metavar}" if info.option.metavar else ""


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    for page in TABLES:
        path = ROOT / page
        path.write_text(rendered(page, path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
