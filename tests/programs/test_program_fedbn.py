"""FedBN against its authors' program, on the tiny problem's network with BatchNorm.

Repository med-air/FedBN, commit 2fa38adf627a8c8ba71c5fb515b1f2ba00aa8812: ``train`` and ``communication`` in
``federated/fed_digits.py``. The client weights, an argument of ``communication``, were n_i / N. Data loading and the
network were replaced.
"""

from pathlib import Path

import numpy as np
from problem import SIZES, check, config, weights
from safetensors.numpy import save_file

# fmt: off
SHARED = [
    -0.267286, -0.065902293, -0.40990263, 0.074871637, 0.30600646, 0.36259285, -0.15739958, -0.38331237, -0.1032724,
    0.085309029, -0.25272352, 0.13764524, 0.40158653, -0.077008583, -0.0029336824, 0.27881688, 0.10974889, 0.23568985,
    0.018857647, 0.38788885, -0.34433204, 0.09754476, -0.40566897, 0.46532989, -0.065600865, -0.42965248, 0.33828145,
    0.4205308, -0.29139024, -0.12777035, -0.29088327, -0.045966119, -0.034558285, -0.15196577, -0.23668358,
    -0.21248609, -0.38684964, -0.32874799, 0.4560383, -0.3133049, 0.31411421, 0.42501694, 0.12372819,
]
# fmt: on
"""The averaged linear layers after two rounds."""
# fmt: off
NORMS = [
    [
        1.4560553, 1.232113, 0.65537226, 1.2666886, 1.3576794, -0.15198812, -0.01079979, 0.13405995, -0.21847121,
        0.13773212, -0.10531664, 0.09097416, -0.15401947, 0.18253851, -0.085928358, 0.69672531, 0.86199176, 0.6694681,
        0.72930902, 0.76394635,
    ],
    [
        1.4622234, 1.2236267, 0.58028287, 1.3688954, 1.3366357, -0.13642244, -0.074472554, 0.069598943, -0.10862283,
        0.11324638, -0.031360395, 0.0814659, -0.078343213, 0.12725948, -0.010639241, 0.7405597, 0.73821849,
        0.67984003, 0.80218071, 0.72746795,
    ],
    [
        1.4624374, 1.2670178, 0.59086013, 1.3192296, 1.3522905, -0.14522327, -0.00383191, 0.089494102, -0.16249533,
        0.12754287, -0.17931402, -0.039549079, -0.16844928, 0.16261436, 0.021859266, 0.75726521, 0.79150367,
        0.67736572, 0.75444388, 0.67273301,
    ],
]
# fmt: on
"""Each client's BatchNorm after two rounds: weight, bias, running mean, running variance."""


def start():
    """Return the initial tensors: the problem's linear layers, and a BatchNorm that is not the identity."""
    rng = np.random.default_rng(41)
    first = weights()
    return {
        "0.weight": first["0.weight"],
        "0.bias": first["0.bias"],
        "1.weight": rng.uniform(0.5, 1.5, 5).astype(np.float32),
        "1.bias": rng.uniform(-0.5, 0.5, 5).astype(np.float32),
        "1.running_mean": np.zeros(5, np.float32),
        "1.running_var": np.ones(5, np.float32),
        "3.weight": first["2.weight"],
        "3.bias": first["2.bias"],
    }


def test_fedbn_matches_the_authors_program(tmp_path, federate):
    settings = config("fedbn", tmp_path, model=f"{Path(__file__).with_name('normalised.py')}:normalised")
    save_file(start(), tmp_path / "start.safetensors")
    finished = federate(settings)
    norms = [finished.kept(client)["personal"] for client in range(len(SIZES))]
    check("fedbn", [(finished.strategy.model, SHARED), *zip(norms, NORMS, strict=True)])
