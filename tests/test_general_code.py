"""General code names no method. Each method declares its properties in its own module."""

import ast
import json
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from posy.commands.cli import main
from posy.storage import load_arrays
from posy.strategies.methods import METHODS

ROOT = Path(__file__).parent.parent
GENERAL = (
    *(ROOT / "posy").glob("*.py"),
    *(path for folder in ("server_app", "data", "report", "deploy") for path in (ROOT / folder).rglob("*.py")),
    *(ROOT / "client_app" / "training").glob("*.py"),
    *(
        ROOT / "client_app" / f"{name}.py"
        for name in (
            "app",
            "base",
            "engine",
            "hooks",
            "jobs",
            "local_run",
            "predictors",
            "state",
            "stored",
            "workspace",
        )
    ),
    *(ROOT / "models" / f"{name}.py" for name in ("architecture", "assembly", "build", "chain", "parameters")),
    *(
        ROOT / "strategies" / f"{name}.py"
        for name in (
            "arrays",
            "base",
            "bounds",
            "cohorts",
            "exchange",
            "hooks",
            "influence",
            "newcomers",
            "replies",
            "rounds",
            "schedule",
            "secure_rounds",
            "server_state",
            "settings",
            "states",
        )
    ),
)
MODULES = {method.replace("-", "_") for method in METHODS}
CLASSES = {f"{name}{end}" for name in METHODS.values() for end in ("", "Settings", "Client")}


def names_in(tree: ast.Module) -> set[str]:
    """Return the names of methods that a module uses: their modules in imports, and their classes."""
    names = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith(("posy.strategies.", "posy.client_app."))
        ):
            names |= {node.module.rpartition(".")[2]} & MODULES
        elif isinstance(node, ast.Name | ast.Attribute):
            names |= {node.id if isinstance(node, ast.Name) else node.attr} & CLASSES
    return names


def test_general_code_names_no_method() -> None:
    names = {path: names_in(ast.parse(path.read_text(encoding="utf-8"))) for path in GENERAL}
    assert {path: methods for path, methods in names.items() if methods} == {}


def test_names_in_finds_methods() -> None:
    code = "from posy.strategies.feddrm import FedDRM\nisinstance(strategy, FedDRM)\nmodule.PPFESettings"
    assert names_in(ast.parse(code)) == {"feddrm", "FedDRM", "PPFESettings"}


WIDE = '''
    """A method that adds a layer to the network of the run."""

    import torch
    from torch import nn

    from posy.strategies.settings import MethodSettings


    class Gated(nn.Module):
        """Scales the features before the head."""

        def __init__(self, chain, *, seed, scale):
            super().__init__()
            self.model = chain
            self.gate = nn.Linear(chain.embedding_dim, chain.embedding_dim)
            nn.init.zeros_(self.gate.bias)
            with torch.no_grad():
                self.gate.weight.copy_(scale * torch.eye(chain.embedding_dim))

        @property
        def layers(self):
            return {"gate": self.gate}

        def forward(self, x, features=False):
            embedded = self.gate(self.model.body(x))
            logits = self.model.head(embedded)
            return (embedded, logits) if features else logits


    class WideSettings(MethodSettings):
        """Keep the gate on the client."""

        def network(self, plain, num_clients):
            return plain.extended(Gated, scale=2.0)

        def personal(self, network):
            return ("gate",)
'''


def test_a_custom_method_adds_layers_to_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wide.py").write_text(dedent(WIDE))
    monkeypatch.chdir(tmp_path)
    words = ["method=wide.py:Wide", "model=mlp", "num-clients=2", "num-server-rounds=2", "max-samples=100"]
    assert main(["run", *words, "run-name=wide", "output-dir=runs"]) == 0
    folder = tmp_path / "runs" / "wide"
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    first, second = (load_arrays(folder / "models" / f"client-{client}.safetensors") for client in range(2))
    assert not np.array_equal(first["gate.weight"], second["gate.weight"]), "the gate is personal"
    assert abs(float(np.diag(first["gate.weight"]).mean()) - 2) < 0.2
