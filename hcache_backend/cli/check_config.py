"""``hcache config``: check a configuration as a server does when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hcache_backend.cli.common import AsJson, explained, print_json, screen
from hcache_backend.config import (
    CLASS_NAME,
    CONFIG_VARIABLE,
    MODULE_PATH,
    ConfigError,
    load_table,
    parse_config,
    start_config,
)


def check_config(
    file: Annotated[
        Path,
        typer.Argument(
            help="TOML or JSON: the extra config of --hicache-storage-backend-extra-config, or the "
            f"table of {CONFIG_VARIABLE}."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Check a configuration without a server. Exit status 2: a server would not start with it."""
    with explained(ConfigError, ValueError):
        text = f"@{file}" if file.suffix == ".toml" else file.read_text(encoding="utf-8")
        table: Any = load_table(text, str(file))
        ours = isinstance(table, dict) and not {"hcache", "module_path"}.isdisjoint(table)
        extra: dict[str, Any] | None = table if ours else None
        if extra is not None:
            for key, wanted in (("module_path", MODULE_PATH), ("class_name", CLASS_NAME)):
                if (found := extra.get(key)) != wanted:
                    raise ConfigError(
                        f"extra config: {key!r} is {found!r}; it must be {wanted!r}, otherwise "
                        "SGLang loads another backend"
                    )
        config = start_config(extra) if extra else parse_config(table, CONFIG_VARIABLE)
    options = config.model_dump(mode="json", exclude_unset=True)
    if as_json:
        print_json(
            {"kind": "extra config" if extra is not None else CONFIG_VARIABLE, "options": options}
        )
        return
    screen.print(f"{file}: no errors", highlight=False)
    for name, value in options.items():
        screen.print(f"  {name} = {value!r}", highlight=False, soft_wrap=True)
