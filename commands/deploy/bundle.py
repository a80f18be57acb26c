"""The app's bundle: this very code, and what people have brought along, as one file for the SuperLink and the nodes."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from flwr.cli.build import build_fab_from_files
from flwr.cli.utils import collect_files

from posy.commands.launch import APP
from posy.extensions import is_own, module_of, to_travel
from posy.paths import sha256_of
from posy.settings import LaunchError, Scalar
from posy.strategies.registry import declared


def bundle(given: Mapping[str, Scalar]) -> tuple[bytes, dict[str, Scalar]]:
    """Return the app as a bundle, and the settings of a run as they are for whoever unpacks it.

    Files that settings name as people's own, and what these import from beside them, lie in its folder ``own``, and
    the settings say so. Each of them is named on the screen.

    Raises
    ------
    LaunchError
        If the app is not there, or does not admit a setting, which Flower would refuse without saying why.
    SettingsError
        If something of people's own cannot be imported here.
    """
    path = APP / "pyproject.toml"
    if not path.is_file():
        raise LaunchError(f"the Flower app is not in {APP}: submit runs from a checkout (`pip install -e .`)")
    project = tomllib.loads(path.read_text(encoding="utf-8"))
    app = project["tool"]["flwr"]["app"]
    sent, files = dict(given), dict[str, Path]()
    for key, setting in declared([]).items():
        if setting.or_own and is_own(value := str(given.get(key, ""))):
            module_of(value, key)
            sent[key], own = to_travel(value)
            if clash := [place for place, file in own.items() if files.get(place, file) != file]:
                raise LaunchError(f"{key} = {value!r}: two files of the run would both be {clash[0]}; rename one")
            files |= own
            if key == "method":
                app["config"] |= {name: item.default for name, item in own_keys(value).items()}
    for key in given.keys() - app["config"].keys():
        raise LaunchError(
            f"{key} is not in [tool.flwr.app.config] of {path}, so Flower does not admit it; `python "
            "docs/generate.py` brings that table up to date"
        )
    app["fab-include"] += files  # Flower refuses a pattern that nothing matches
    content: dict[str, Any] = {**collect_files(APP), **files, "pyproject.toml": tomli_w.dumps(project).encode()}
    for place, file in sorted(files.items()):
        print(f"posy: {file} travels with the run as {place} (SHA-256 {sha256_of(file)[:16]}…)")
    return build_fab_from_files(content)[0], sent


def own_keys(method: str) -> dict[str, Any]:
    """Return the settings of a method of people's own by key."""
    common = declared([])
    return {key: setting for key, setting in declared([method]).items() if key not in common}
