"""What is made from the source in docs/: reference tables, and a worked example.

``python -m proxy.reference`` (``make docs``) rewrites what stands between the markers of a table.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from proxy.__main__ import parsers
from proxy.errors import TABLE, AdapterRefused
from proxy.settings import OLD_NAMES, OptionInfo, options

ROOT = Path(__file__).parents[1]
STICKY = ROOT / "docs/examples/sticky"


COMMANDS = ("run", "demo", "replay", "routers")
"""The others, `doctor` and `deploy`, have pages of their own."""


def settings_table() -> str:
    """One row for each option of ``rollmux serve``, with its name in the environment."""
    rows = ["| option | environment | default | meaning |", "|---|---|---|---|"]
    for info in options():
        flag = _escape(f"`{info.flag}{_metavar(info)}`")  # a bar ends a cell, even in code
        default = info.default_text
        if info.option.unit:
            default += f" {info.option.unit}" if info.default is not None else ""
        env = f"`{info.env}`" if info.env else "no"
        rows.append(f"| {flag} | {env} | {default} | {_escape(info.help_text)} |")
    return "\n".join(rows)


def commands_table() -> str:
    """One row for each option of ``COMMANDS`` that is not one of ``rollmux serve``."""
    _, commands = parsers()
    settings = {info.flag: info.help_text for info in options()}
    rows = ["| command | option | meaning |", "|---|---|---|"]
    for name in COMMANDS:
        for action in commands[name]._actions:
            flag = next((word for word in action.option_strings if word.startswith("--")), "")
            if flag in ("", "--help", "--config"):
                continue
            if flag in settings and (action.help or "").startswith(settings[flag]):
                continue  # replay has some of the same name that mean something else
            words = action.metavar or "|".join(action.choices or [action.dest.upper()])
            metavar = "" if action.nargs == 0 else f" {words}"
            # As --help writes it, with the default filled in.
            text = (action.help or "") % {"default": action.default}
            rows.append(f"| `rollmux {name}` | `{_escape(flag + metavar)}` | {_escape(text)} |")
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


def example() -> str:
    """The policy of the worked example, as it is."""
    return f"```python\n{(STICKY / 'rollmux_sticky.py').read_text('utf-8')}```"


def entry_point() -> str:
    """The lines of its ``pyproject.toml`` that give it a name."""
    text = (STICKY / "pyproject.toml").read_text("utf-8")
    table = text[text.index("[project.entry-points") :].partition("\n\n")[0]
    return f"```toml\n{table}\n```"


TABLES = {
    "docs/settings.md": {"settings": settings_table, "commands": commands_table},
    "docs/migration.md": {"old-names": old_names_table},
    "docs/plugins.md": {"example": example, "entry-point": entry_point},
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
