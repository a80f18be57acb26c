"""`posy policy`: write a site's policy, explain it, and predict whether it would refuse a run."""

import textwrap
from pathlib import Path
from typing import Annotated

import typer

from posy.commands.help import commands_in
from posy.listing import print_table
from posy.settings import COMMAND_LINE, SettingsError, as_config, settings_of
from posy.yaml12 import dump

FILE = Path("policy.yaml")
REFUSED = 1
"""Exit status of `posy policy check` for a run that the policy refuses."""

app = typer.Typer(help="Write, explain and test the policy of a site.", no_args_is_help=True)
command = commands_in(app)


@command()
def new(file: Annotated[Path, typer.Argument(metavar="[FILE]", help="New file (default: policy.yaml).")] = FILE) -> int:
    """Write a policy that explains each rule and sets it to its default.

    Add the file to the node config: `posy supernode data=PATH policy=FILE`.
    """
    if file.exists():
        raise SettingsError(f"{file} already exists; choose another file, or remove this one")
    file.write_text(default_text(), encoding="utf-8")
    print(f"{file}: edit the rules, then start the node with policy={file}")
    return 0


@command(
    epilog="""\b
examples:
  posy policy check policy.yaml                           explain the rules
  posy policy check policy.yaml method=fedavg lr=0.01     test a run"""
)
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Policy of a site (YAML).")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value]...", help="Settings of a run; experiment=FILE names a settings file."),
    ] = None,
) -> int:
    """Explain a policy, or predict which of its rules would refuse a run.

    Without settings, Posy explains the rules. The exit status is 1 if the policy refuses the run. The node checks the
    rules on rows, parameters and runs per day only when the run begins.
    """
    from posy.client_app.policy import violations  # noqa: PLC0415 - imports Flower
    from posy.data.policy import Policy, read_policy  # noqa: PLC0415
    from posy.data.settings import SITES  # noqa: PLC0415
    from posy.strategies.registry import parse_words, read_settings  # noqa: PLC0415

    policy = read_policy(file)
    declared, defaults = settings_of(Policy), as_config(Policy())
    rows = [
        (key, str(value) if value != "" else "(empty)", "" if value == defaults[key] else "changed", declared[key].help)
        for key, value in as_config(policy).items()
    ]
    if not settings:
        print_table(f"rules of {file}", ("rule", "value", "", "meaning"), rows)
        return 0
    config = {"dataset": SITES, **parse_words(settings, COMMAND_LINE)}
    violated = violations(policy, read_settings(config, COMMAND_LINE).as_config())
    if not violated:
        print("accepted: the settings violate no rule")
        return 0
    print_table("refused", ("rule", "reason"), violated)
    return REFUSED


def default_text() -> str:
    """Return the default policy as YAML, with the meaning of each rule as a comment."""
    from posy.data.policy import Policy  # noqa: PLC0415

    lines = ["# Policy of a site. Only this node reads the file. `posy policy check FILE` explains it."]
    for key, setting in settings_of(Policy).items():
        bounds = "" if setting.kind is str and not setting.choices else f" ({setting.allowed()})"
        lines += ["", *textwrap.wrap(f"{setting.help}{bounds}", 100, initial_indent="# ", subsequent_indent="# ")]
        lines.append(dump({key: setting.default}).strip())
    return "\n".join(lines) + "\n"
