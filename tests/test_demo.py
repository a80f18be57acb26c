"""The files of the Docker demonstration agree with each other and with the settings; docker/check.sh runs it."""

import csv
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from posy.client_app.node_config import check_node_config
from posy.commands.check_site import check_site
from posy.commands.cli import main
from posy.commands.deploy.policy import default_text
from posy.data.policy import Policy, read_policy
from posy.data.settings import DataSettings

DOCKER = Path(__file__).resolve().parent.parent / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
POLICY = DOCKER / "policy.yaml"
HOSPITALS = 5


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the files of the hospitals, as the service `setup` writes them."""
    folder = tmp_path_factory.mktemp("patients")
    files = [folder / f"{number}.csv" for number in range(HOSPITALS)]
    subprocess.run([sys.executable, "-P", DOCKER / "hospitals.py", *files], check=True, timeout=300)
    return files


def test_the_policy_matches_posy_policy_new() -> None:
    changed = {"columns", "label", "max-local-epochs", "max-rounds", "min-clients", "secure-aggregation", "scores"}
    changed |= {"max-answers-per-day"}
    lines = {"demo": POLICY.read_text(encoding="utf-8").splitlines(), "new": default_text().splitlines()}
    demo, new = ([re.sub(r"^([a-z-]+): .*", r"\1", line) for line in lines[name]] for name in ("demo", "new"))
    assert demo == new
    policy = read_policy(POLICY)
    different = {
        field.name.replace("_", "-") for field in fields(Policy) if getattr(policy, field.name) != field.default
    }
    assert different == changed


def test_the_policy_requires_secure_aggregation(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["policy", "check", str(POLICY), f"experiment={DOCKER / 'run.yaml'}"]
    assert main(words) == 0
    assert "accepted" in capsys.readouterr().out
    assert main([*words, "secure-aggregation=false"]) == 1
    assert re.search(r"secure-aggregation +secure-aggregation = false", capsys.readouterr().out)


def test_patients_are_divided_into_valid_sites(patients: list[Path]) -> None:
    numbers: list[int] = []
    malignant = []
    for file in patients:
        with file.open(encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
        numbers += [int(row["patient"]) for row in rows]
        malignant.append(sum(row["diagnosis"] == "malignant" for row in rows) / len(rows))
        report = check_site({"data": str(file), "policy": str(POLICY)}, DataSettings(dataset="sites"))
        assert list(report.classes) == ["benign", "malignant"]
        assert min(training for training, _ in report.classes.values()) >= read_policy(POLICY).min_rows
        assert not report.warnings
    assert sorted(numbers) == list(range(569))
    assert malignant == sorted(malignant)


def test_compose_nodes_have_data_policy_and_signing_keys() -> None:
    nodes = {name: service for name, service in COMPOSE["services"].items() if name.startswith("node-")}
    assert len(nodes) == HOSPITALS
    for name, service in nodes.items():
        config = dict(word.split("=", 1) for word in service["command"] if "=" in word)
        check_node_config(config)
        assert {"data", "policy", "signing-key", "trusted-keys", "state-dir"} == set(config)
        assert all(value.startswith("/data/") for value in config.values())
        assert service["volumes"] == [f"{name}:/data"]


def test_the_service_and_the_superlink_share_the_folder_of_the_socket() -> None:
    serve, superlink = (COMPOSE["services"][name] for name in ("serve", "superlink"))
    folder = serve["environment"]["TMPDIR"]
    [volume] = [volume for volume in serve["volumes"] if volume.split(":")[1] == folder]
    assert volume in superlink["volumes"] and not volume.endswith(":ro")
    assert serve["network_mode"] == "service:superlink"


def test_the_gpu_file_changes_exactly_the_nodes() -> None:
    changed = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text(encoding="utf-8"))["services"]
    assert set(changed) == {name for name in COMPOSE["services"] if name.startswith("node-")}
