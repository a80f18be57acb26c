"""FedDRM's published program solves the tiny problem with two branches as Posy does, and routes samples alike.

The program is zijianwang0510/FedDRM at commit 3479abf07c8c4eb50e9aa47c5719b4b6cfa0a00e. The numbers come from
``FedDRM.train`` (algorithms/feddrm.py) with λ = 0.8, momentum 0.9, weight decay 5e-4, two local steps a round and its
cosine schedule. Both branches share the hidden layer. The client classifier starts from the output layer of the
problem's second model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from problem import LR, NAMES, STEPS, check, config, samples, weights
from safetensors.numpy import load_file

from posy.server_app.system import chosen_clients

# fmt: off
SHARED = (
    -0.26268929, -0.069833308, -0.41066301, 0.091987878, 0.29270795, 0.3671447, -0.14651482, -0.36520237,
    -0.1029135, 0.09030728, -0.24031791, 0.13953313, 0.39589471, -0.092442647, -0.025803883, 0.27294189,
    0.11104947, 0.24513265, 0.012700012, 0.38103378, -0.3431854, 0.092299223, -0.41074926, 0.433963,
    -0.065175943, 0.49289379, 0.081446446, -0.35824698, 0.19185174, 0.18971319, 0.35556549, 0.17938828,
    -0.17606929, -0.45884636, -0.051438317, 0.12814471, 0.23079672, 0.17090076, 0.098591395, 0.10486303,
    -0.26670396, -0.10991737, -0.079608552,
)
"""The shared layers after two rounds: hidden layer, then client classifier."""
HEADS = (
    (
        -0.38011459, 0.34828386, 0.4287799, -0.22960371, -0.155385, -0.31290689, -0.032846432, -0.023065206,
        -0.16894862, -0.1865674, -0.23979741, -0.40995124, -0.3485027, 0.41123188, -0.33565903, 0.37502873,
        0.46393082, 0.023712119,
    ),
    (
        -0.39212394, 0.35855445, 0.4260577, -0.32082033, -0.19784115, -0.3065331, -0.096643597, -0.025870884,
        -0.17738914, -0.18952687, -0.23416184, -0.35642466, -0.34297481, 0.51088893, -0.29024342, 0.21035765,
        0.46131688, 0.19099717,
    ),
    (
        -0.3789838, 0.41037813, 0.4287799, -0.27002639, -0.16583475, -0.32361603, -0.11070634, -0.023065206,
        -0.17886639, -0.18079956, -0.23021905, -0.3941856, -0.3485027, 0.46157226, -0.33097717, 0.38525543,
        0.35873169, 0.11868455,
    ),
)
"""Each client's class classifier after two rounds."""
ACCURACY = 0.291666667
"""Accuracy of the served models, weighted by n_i."""
BY_DENSITY = (1, 0, 1, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1)
"""The client that each of the 24 samples is routed to."""
# fmt: on


def test_feddrm_matches_the_published_program(tmp_path: Path, federate: Callable[..., Any]) -> None:
    def start(strategy: Any) -> None:
        head = [weights(1)[name].ravel() for name in NAMES[2:]]
        strategy.model = np.concatenate([strategy.model[: -sum(map(len, head))], *head])

    settings = {
        "local_steps": STEPS,
        "lr": LR,
        "lr_schedule": "cosine",
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "feddrm_class_weight": 0.8,
    }
    finished = federate(config("feddrm", tmp_path, **settings), prepare=start, models_folder=tmp_path)
    strategy = finished.strategy
    heads = [finished.kept(client)["personal"] for client in range(3)]
    check("feddrm", [(strategy.model, SHARED), *zip(heads, HEADS, strict=True)])

    served = [load_file(tmp_path / f"served-{client}.safetensors") for client in range(3)]
    stored = sorted(served[0])
    x = torch.from_numpy(np.concatenate([inputs for inputs, _ in samples()]))
    layers = strategy.architecture.build()
    layers.load_state_dict({name: torch.from_numpy(served[0][name]) for name in stored})
    layers.eval()
    assert tuple(chosen_clients(strategy, layers(x)[1].detach()).tolist()) == BY_DENSITY
    scores = [row["served_accuracy"] for _, row in sorted(finished.records[-1].clients.items())]
    assert abs(np.average(scores, weights=(8, 6, 10)) - ACCURACY) < 1e-6
