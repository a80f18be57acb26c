"""The app's bundle: a single file with Posy's code and the user's files, for the SuperLink and the nodes."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from posy.commands.launch import APP
from posy.deploy.flower_internals import build_bundle
from posy.extensions import bundle_files, is_custom, module_of
from posy.paths import sha256_of
from posy.settings import LaunchError, Scalar
from posy.strategies.registry import declared


def bundle(settings: Mapping[str, Scalar]) -> tuple[bytes, dict[str, Scalar]]:
    """Return the app as a bundle, and a run's settings with the paths of custom files changed to paths in the bundle.

    The folder ``own`` of the bundle contains the user's files that the settings name, and the modules that these files
    import from their own folder. The function prints the name of each file in this folder.

    Raises
    ------
    LaunchError
        If the app is missing, if it does not declare one of the settings (Flower would reject the run without a
        reason), or if two files would have the same path in the bundle.
    SettingsError
        If Posy cannot import one of the user's files on this machine.
    """
    path = APP / "pyproject.toml"
    if not path.is_file():
        raise LaunchError(f"the Flower app is not in {APP}; submit runs from a checkout (`pip install -e .`)")
    project = tomllib.loads(path.read_text(encoding="utf-8"))
    app = project["tool"]["flwr"]["app"]
    sent_settings, files = dict(settings), dict[str, Path]()
    for key, setting in declared([]).items():
        if setting.custom_kind and is_custom(value := str(settings.get(key, ""))):
            module_of(value, key)
            sent_settings[key], imported = bundle_files(value)
            if clash := [target for target, file in imported.items() if files.get(target, file) != file]:
                raise LaunchError(f"{key} = {value!r}: two files would both be {clash[0]} in the bundle; rename one")
            files |= imported
            if key == "method":
                app["config"] |= {name: item.default for name, item in custom_keys(value).items()}
    for key in settings.keys() - app["config"].keys():
        raise LaunchError(
            f"{key} is not in [tool.flwr.app.config] of {path}, so Flower would reject it; run `python "
            "docs/generate.py` to update this table"
        )
    app["fab-include"] += files  # not a pattern for the folder, because Flower rejects patterns without a match
    content: dict[str, Any] = {
        **_files_of_the_app(app["fab-include"]),
        **files,
        "pyproject.toml": tomli_w.dumps(project).encode(),
    }
    for target, file in sorted(files.items()):
        print(f"posy: {file} is sent with the run as {target} (SHA-256 {sha256_of(file)[:16]}…)")
    return build_bundle(content), sent_settings


def _files_of_the_app(patterns: Sequence[str]) -> dict[str, Path]:
    """Return the files of this checkout that match the patterns, by relative path; skip symbolic links."""
    paths = [path for pattern in patterns for path in APP.glob(pattern.removeprefix("/"))]
    paths = [
        path
        for path in (*paths, APP / ".gitignore")
        if path.is_file() and path.resolve() == APP.resolve() / path.relative_to(APP)
    ]
    return {path.relative_to(APP).as_posix(): path for path in paths}


def custom_keys(method: str) -> dict[str, Any]:
    """Return a custom method's own settings by key, without the settings that all methods share."""
    common = declared([])
    return {key: setting for key, setting in declared([method]).items() if key not in common}
