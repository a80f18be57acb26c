"""Signed apps: a node with trusted entities runs an app only if one of them has signed it."""

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.cli.build import build_fab_from_files
from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign, sign_message
from sklearn.datasets import load_digits

from benchmarks.local_federation import Deployment
from posy.client_app.audit import AuditLog
from posy.commands import cli
from posy.deploy.apps import Apps
from posy.deploy.tasks import Bundle
from posy.deploy.trusted import UntrustedAppError, check_signatures, read_entities
from posy.settings import SettingsError

KEY_ID = "fpk_3f0c5b9a"
HUB = {"valid_license": "Valid"}
"""Entry that Flower's SuperLink adds to the signatures of an app."""


def public_text(key: Any) -> str:
    return str(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode())


def verification(key: Ed25519PrivateKey, content: bytes) -> str:
    """Return a signature of an app in the form of Flower Hub, which `flwr app review` uploads."""
    import base64

    at = int(time.time())
    signature = sign_message(key, create_message_to_sign(hashlib.sha256(content).digest(), at))
    return json.dumps({"signed_at": at, "signature": base64.urlsafe_b64encode(signature).decode().rstrip("=")})


@pytest.fixture
def bundle() -> bytes:
    """Return an app whose ClientApp leaves a trace when it is imported."""
    config = '[project]\nname = "a"\nversion = "1.0"\ndescription = ""\nlicense = "MIT"\n[tool.flwr.app]\n'
    config += 'publisher = "p"\n[tool.flwr.app.components]\nserverapp = "s:app"\nclientapp = "c_signed:app"\n'
    client = "import os\nos.environ['POSY_TEST_TRACE'] = 'imported'\n"
    client += "from flwr.clientapp import ClientApp\napp = ClientApp()\n"
    files = {"pyproject.toml": config, "c_signed.py": client, "s.py": "app = None\n", "LICENSE": "free\n"}
    return build_fab_from_files({name: text.encode() for name, text in files.items()})[0]


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def fab(content: bytes, verifications: dict[str, str]) -> Bundle:
    return Bundle(hashlib.sha256(content).hexdigest(), content, verifications)


def test_a_trusted_signature_is_accepted(key: Ed25519PrivateKey, bundle: bytes) -> None:
    signed = fab(bundle, {**HUB, "fpk_other": "no json", KEY_ID: verification(key, bundle)})
    entities = {"fpk_other": public_text(Ed25519PrivateKey.generate()), KEY_ID: public_text(key)}
    assert check_signatures(signed, entities) == [KEY_ID]


def test_apps_without_a_trusted_signature_are_rejected(key: Ed25519PrivateKey, bundle: bytes) -> None:
    entities = {KEY_ID: public_text(key)}
    foreign_signature = verification(Ed25519PrivateKey.generate(), bundle)
    for verifications in (
        {},
        HUB,
        {KEY_ID: verification(key, bundle)},  # the SuperLink does not verify apps
        {**HUB, KEY_ID: foreign_signature},
        {**HUB, KEY_ID: verification(key, bundle + b"x")},
        {**HUB, "fpk_unknown": verification(key, bundle)},
        {**HUB, KEY_ID: "{}"},
        {**HUB, KEY_ID: '{"signed_at": -1, "signature": "!"}'},
    ):
        with pytest.raises(UntrustedAppError, match="none of this node's trusted entities"):
            check_signatures(fab(bundle, verifications), entities)
    other = Bundle("0" * 64, bundle, {**HUB, KEY_ID: verification(key, bundle)})
    with pytest.raises(UntrustedAppError, match="does not match its hash"):
        check_signatures(other, entities)


def test_the_worker_neither_unpacks_nor_imports_an_unsigned_app(
    key: Ed25519PrivateKey, bundle: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setenv("POSY_TEST_TRACE", "")
    apps = Apps({KEY_ID: public_text(key)})
    with pytest.raises(UntrustedAppError):
        apps.load(fab(bundle, HUB), "any")
    assert not (tmp_path / "apps").exists()
    import os

    assert not os.environ["POSY_TEST_TRACE"]
    assert apps.signers == []
    assert apps.load(fab(bundle, {**HUB, KEY_ID: verification(key, bundle)}), "any") is not None
    assert os.environ["POSY_TEST_TRACE"] == "imported"
    assert apps.signers == [KEY_ID]
    assert Apps().load(fab(bundle, {}), "any") is not None  # without the option every app runs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("", r"must hold `key: value` lines|does not name an entity"),
        ("{}", "does not name an entity; add a line `key id: ssh-ed25519"),
        ("fpk_1: ssh-ed25519 nonsense", "fpk_1 must be a public key as `ssh-keygen -t ed25519`"),
        ("fpk_1: 7", "fpk_1 must be a public key as `ssh-keygen -t ed25519`"),
        ("- a\n- b", "must hold `key: value` lines"),
    ],
)
def test_an_invalid_key_file_is_a_command_error(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trusted.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_entities(file)
    assert cli.main(["supernode", "--insecure", "--trusted-entities", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_a_key_of_another_type_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "trusted.yaml"
    file.write_text(f"fpk_1: {public_text(ec.generate_private_key(ec.SECP256R1()))}\n")
    with pytest.raises(SettingsError, match="fpk_1 must be a public key as `ssh-keygen -t ed25519`"):
        read_entities(file)


def test_warm_and_stock_nodes_get_the_option(
    key: Ed25519PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test catches the command before its process starts."""
    monkeypatch.chdir(tmp_path)
    Path("trusted.yaml").write_text(f"{KEY_ID}: {public_text(key)}\n")
    commands: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda program, command, environment: commands.append(command))
    for more in ([], ["--stock"]):
        cli.main(["supernode", "--insecure", "--trusted-entities", "trusted.yaml", *more])
        assert commands[-1][commands[-1].index("--trusted-entities") + 1] == str(tmp_path / "trusted.yaml")


# -- real processes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Ed25519PrivateKey]]:
    """Start a SuperLink, and a warm and a stock node that trust one key."""
    folder, key = tmp_path_factory.mktemp("signed"), Ed25519PrivateKey.generate()
    x, y = load_digits(return_X_y=True)
    np.savez(folder / "data.npz", x_train=x[:200].astype(np.float32), y_train=y[:200])
    (folder / "trusted.yaml").write_text(f"{KEY_ID}: {public_text(key)}\n")
    deployment = Deployment.__new__(Deployment)
    deployment.processes = {}
    try:
        deployment.__init__(folder, ["warm", "stock"])  # type: ignore[misc]
        trusting = ["--trusted-entities", "trusted.yaml", "num-partitions=2"]
        deployment.node("warm", *trusting, "partition-id=0", f"audit={folder}/warm.jsonl")
        deployment.node("stock", *trusting, "partition-id=1", "--stock")
        deployment.until(lambda: deployment.ready("warm"), "warm")
        deployment.until(lambda: "SuperNode ID" in deployment.log("stock"), "stock")
        yield deployment, key
    finally:
        deployment.stop()


def settings(deployment: Deployment, seed: int, join_timeout: int) -> list[str]:
    words = {
        "dataset": deployment.folder / "data.npz", "model": "mlp", "device": "cpu", "num-clients": 2,
        "method": "fedavg", "num-server-rounds": 1, "local-epochs": 1, "join-timeout": join_timeout, "seed": seed,
    }  # fmt: skip
    return [f"{name}={value}" for name, value in words.items()]


@pytest.mark.federation
@pytest.mark.xdist_group("signed")
def test_nodes_refuse_an_unsigned_app(signing: tuple[Deployment, Ed25519PrivateKey]) -> None:
    deployment, _ = signing
    deployment.submit("unsigned", *settings(deployment, 0, 10))
    assert deployment.ended("run-unsigned") == 1
    assert "its copy of the app is not valid: The FAB could not be verified" in deployment.log("run-unsigned")
    for name in ("warm", "stock"):
        assert "The FAB could not be verified" in deployment.log(name)
    assert "processing the" not in deployment.log("warm")
    begin, *refused = AuditLog(deployment.folder / "warm.jsonl").check().events
    assert begin["event"] == "run-begin"
    assert {(event["event"], event["decision"]) for event in refused} == {("refusal", "trusted-entities")}


@pytest.mark.federation
@pytest.mark.xdist_group("signed")
def test_nodes_run_a_signed_app(signing: tuple[Deployment, Ed25519PrivateKey]) -> None:
    """The test writes the signature to the SuperLink's database, like a signature of Flower Hub."""
    deployment, key = signing
    before = fabs(deployment)
    (deployment.folder / "losses.py").write_text(
        "from torch.nn.functional import cross_entropy\n\n\ndef mine(logits, labels):\n"
        "    return cross_entropy(logits, labels, reduction='none')\n"
    )  # the app differs from the unsigned app
    deployment.submit("signed", *settings(deployment, 1, 300), "loss=losses:mine")
    deployment.until(lambda: fabs(deployment) - before, "run-signed")
    [hash_str] = fabs(deployment) - before
    with sqlite3.connect(deployment.folder / "superlink/state.db", timeout=60.0) as database:
        [content] = database.execute("SELECT content FROM fab WHERE fab_hash = ?", (hash_str,)).fetchone()
        verifications = json.dumps({**HUB, KEY_ID: verification(key, content)})
        database.execute("UPDATE fab SET verifications = ? WHERE fab_hash = ?", (verifications, hash_str))
    database.close()
    assert deployment.ended("run-signed") == 0, deployment.log("run-signed")[-3000:]
    assert deployment.summary("signed")["status"] == "completed"
    assert deployment.log("warm").count("processing the train message") == 1
    checked = AuditLog(deployment.folder / "warm.jsonl").check()
    signed = [event for event in checked.events if event["code"] == hash_str and event.get("type") == "train"]
    assert [event["signers"] for event in signed] == [[KEY_ID]]
    assert (checked.line, checked.problem) == (0, "")


def fabs(deployment: Deployment) -> set[str]:
    """Return the hashes of the apps in the SuperLink's database."""
    database = sqlite3.connect(deployment.folder / "superlink/state.db", timeout=60.0)
    try:
        return {row[0] for row in database.execute("SELECT fab_hash FROM fab")}
    finally:
        database.close()
