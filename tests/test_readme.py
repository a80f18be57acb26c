"""What the README shows works as it stands there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NODE_CONFIG = {"partition-id", "num-partitions", "state-dir", "skip-unreadable"}
PACKAGES = ("posy", "data", "models", "strategies", "client_app", "server_app", "commands", "experiments")


def test_every_file_and_setting_that_the_readme_names_exists() -> None:
    from posy.strategies.methods import METHODS
    from posy.strategies.registry import defaults

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in re.findall(r"(?:benchmarks|experiments|docs)/[\w./-]+\.\w+", readme):
        assert (ROOT / path).exists(), path
    table = readme[readme.index("## Methods") : readme.index("## Data")]
    assert set(METHODS) <= set(re.findall(r"`([\w-]+)`", table))
    for key in re.findall(r"`([a-z]+(?:-[a-z]+)+)=", readme):
        assert key in defaults().keys() | NODE_CONFIG, key
    assert "@@" not in readme


def test_how_far_stacked_models_part_is_what_was_measured() -> None:
    from posy.strategies.methods import METHODS

    rows = (ROOT / "benchmarks/results/stacking.txt").read_text(encoding="utf-8").splitlines()[1:]
    worst = {row.split()[0]: max(map(float, row.split()[1:])) for row in rows}
    assert worst.keys() == set(METHODS)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    claimed = re.search(
        r"models of nine methods are within (\S+) of .* PPFE within (\S+), and those of FedFew, FedAMP and cwFedAvg, "
        r"whose weights amplify rounding, within (\S+), (\S+) and (\S+) \(",
        readme,
    )
    assert claimed is not None
    most, *others = map(float, claimed.groups())
    assert others == [worst.pop(method) for method in ("ppfe", "fedfew", "fedamp", "cwfedavg")]
    assert len(worst) == 9
    assert max(worst.values()) <= most
