"""CFL against the authors' program.

The numbers come from felisat/clustered-federated-learning at 23a1c388: the loop of clustered_federated_learning.ipynb
with EPS_1 = 0.06, EPS_2 = 0.12 and without its wait of 20 rounds, over Client.compute_weight_update,
Server.cluster_clients and Server.aggregate_clusterwise of fl_devices.py. Client.compute_weight_update multiplies the
rate by 0.99 before each round, so its first rate is 0.1 / 0.99.
"""

import numpy as np
from problem import CLASSES, FEATURES, HIDDEN, SIZES, check, config

D = FEATURES * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
TOGETHER = (
    -0.26784316,
    -0.069030136,
    -0.4076395,
    0.093015783,
    0.28917772,
    0.38811076,
    -0.14111859,
    -0.35488701,
    -0.10119051,
    0.091602691,
    -0.249827,
    0.14411078,
    0.38318849,
    -0.099036358,
    -0.037142709,
    0.26418608,
    0.11364733,
    0.24916205,
    0.012844451,
    0.38335115,
    -0.34286246,
    0.11808202,
    -0.405669,
    0.40842146,
    -0.061655134,
    -0.37981707,
    0.37730968,
    0.42887318,
    -0.25008982,
    -0.15798083,
    -0.31870893,
    -0.067721903,
    -0.023070224,
    -0.17021425,
    -0.18544973,
    -0.2344958,
    -0.40412211,
    -0.34857848,
    0.43298632,
    -0.33432826,
    0.38604575,
    0.41173759,
    0.065075994,
)
"""The model of clients 0 and 2 after two rounds."""
APART = (
    -0.26252684,
    -0.06892921,
    -0.41421407,
    0.095765844,
    0.31115916,
    0.30355287,
    -0.15217596,
    -0.37283027,
    -0.10846122,
    0.086288221,
    -0.21043284,
    0.1251681,
    0.43575481,
    -0.042767793,
    -0.0096068801,
    0.3071672,
    0.10631398,
    0.23372668,
    0.0055799647,
    0.3769162,
    -0.34128731,
    0.021132041,
    -0.42720404,
    0.48382539,
    -0.07218983,
    -0.39364383,
    0.35809928,
    0.42649469,
    -0.32802972,
    -0.19900006,
    -0.30510831,
    -0.093412161,
    -0.025624236,
    -0.17477503,
    -0.19164851,
    -0.23426966,
    -0.35922149,
    -0.34364596,
    0.51548702,
    -0.28711024,
    0.19903187,
    0.46861079,
    0.19521667,
)
"""The model of client 1, which left the cluster in round 1."""


def test_cfl_matches_the_authors_program(tmp_path, federate):
    settings = {"cfl_eps1": 0.06, "cfl_eps2": 0.12, "lr_schedule": "exponential", "lr_decay": 0.99}
    settings["client_weights"] = "uniform"
    strategy = federate(config("cfl", tmp_path, **settings)).strategy
    assert strategy.cluster.tolist() == [0, 1, 0] and len(SIZES) == 3
    served = np.stack([strategy.serve(client)["model"] for client in range(3)])
    assert served.shape == (3, D)
    check("cfl", [(served[0], TOGETHER), (served[1], APART), (served[2], TOGETHER)])
