"""pFedFDA against its authors' program.

Repository cj-mclaughlin/pFedFDA, commit 73c7c407a49575636bcda222968a2a4ddf73a68a: ``ServerFedFDA.train`` in
``servers/server_fedfda.py`` with ``--local_beta``, which sets β to 1, and ``ClientFedFDA`` in
``clients/client_fedfda.py``. Data loading and the network were replaced, and the initial means are the numbers below.
"""

import numpy as np
from problem import check, config

# fmt: off
MEANS = [
    [0.77395606, 0.43887845, 0.85859793, 0.69736803, 0.09417735],
    [0.97562236, 0.76113969, 0.78606433, 0.12811363, 0.45038593],
    [0.37079802, 0.92676497, 0.64386511, 0.8227616, 0.44341421],
]
# fmt: on
"""The initial global means."""
EPSILON = 1e-4
"""The program adds it to every element of a covariance and also adds the identity. Posy adds only the identity."""
# fmt: off
BODY = [
    -0.25876737, -0.075714417, -0.4091627, 0.092883572, 0.28332347, 0.36261168, -0.18195888, -0.40080291, -0.10104156,
    0.091711558, -0.25063404, 0.14449885, 0.39049333, -0.092340201, -0.012252592, 0.27301979, 0.115023, 0.23747015,
    5.5674114e-05, 0.38489234, -0.34503233, 0.098555066, -0.40522784, 0.45355439, -0.065057077,
]
# fmt: on
"""The averaged body after two rounds: weight, then bias."""
# fmt: off
TRAINED_MEANS = [
    [0.066125624, 0.15170556, 0.053662371, 0.42540064, 0.17195404],
    [0.050896265, 0.42041579, 0, 0.75815547, 0.045253903],
    [0.14965333, 0.28751934, 0.090171501, 0.52392864, 0.20642704],
]
# fmt: on
# fmt: off
COVARIANCE = [
    [1.010267, -0.013944625, 0.0020518114, 0.0028293394, -0.0011244366],
    [-0.013944625, 1.1511836, -0.00073335186, -0.067609668, -0.0061539491],
    [0.0020518114, -0.00073335186, 1.0009654, 0.0022373735, 0.00049981795],
    [0.0028293394, -0.067609668, 0.0022373735, 1.1086377, 0.013863156],
    [-0.0011244366, -0.0061539491, 0.00049981795, 0.013863156, 1.0217131],
]
# fmt: on
"""The global Gaussians after two rounds."""


def test_pfedfda_matches_the_authors_program(tmp_path, federate):
    def start(strategy):
        strategy.means = np.float32(MEANS)

    settings = config("pfedfda", tmp_path, pfedfda_beta=1.0, pfedfda_features="training")
    strategy = federate(settings, prepare=start).strategy
    covariance = np.float64(COVARIANCE) - EPSILON
    check("pfedfda", [(strategy.model, BODY), (strategy.means, TRAINED_MEANS), (strategy.covariance, covariance)])
