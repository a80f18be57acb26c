"""IFCA against FedFew's program.

The numbers come from pgg3/FedFew at 1b29dec7, which extends PFLlib: clientIFCA.select_cluster and clientIFCA.train of
clientifca.py, IFCA.receive_models and IFCA.aggregate_parameters of serverifca.py. Its two models are the first and the
fourth initial model of the problem. The authors' programs for images need TensorFlow 1, and their program for linear
regression has only gradient averaging.
"""

import numpy as np
from problem import check, config, flat, weights

FIRST = (
    -0.27130702,
    -0.068200797,
    -0.40839785,
    0.093236268,
    0.29081684,
    0.38560298,
    -0.14627694,
    -0.39700764,
    -0.10119051,
    0.091602691,
    -0.249827,
    0.14411078,
    0.38878301,
    -0.13159126,
    -0.068876527,
    0.27523857,
    0.11784313,
    0.24867859,
    0.01599147,
    0.38103926,
    -0.34066623,
    0.096637554,
    -0.405669,
    0.43040395,
    -0.06219019,
    -0.37925002,
    0.41167387,
    0.42887318,
    -0.27438453,
    -0.16381584,
    -0.32487607,
    -0.11112048,
    -0.023070224,
    -0.17356682,
    -0.18200402,
    -0.22889572,
    -0.39508778,
    -0.34857848,
    0.46063361,
    -0.33193892,
    0.39229003,
    0.35250756,
    0.11806178,
)
"""The first cluster's model after two rounds. It has only client 2."""
SECOND = (
    -0.05577302,
    0.069094032,
    0.40176862,
    -0.26129916,
    0.088781267,
    -0.14087668,
    0.25637361,
    0.043058861,
    -0.31445163,
    0.032060154,
    -0.25380301,
    -0.4327926,
    -0.37966198,
    -0.14941762,
    -0.49076349,
    0.27277479,
    0.30261147,
    -0.47240022,
    0.043789916,
    -0.066049457,
    -0.098655969,
    -0.42807662,
    0.42186451,
    -0.21052571,
    0.43081838,
    -0.1010036,
    -0.29043815,
    -0.29817224,
    -0.27872485,
    0.26549351,
    0.328311,
    0.30837792,
    -0.15668881,
    -0.17515028,
    0.13368368,
    0.21732664,
    0.20666009,
    0.31472385,
    0.26210475,
    -0.042186301,
    0.17029457,
    0.31899518,
    -0.33971995,
)
"""The second cluster's model. It has clients 0 and 1."""


def test_ifca_matches_fedfew(tmp_path, federate):
    def start(strategy):
        strategy.models = np.stack([flat(weights(0)), flat(weights(3))])

    finished = federate(config("ifca", tmp_path, ifca_clusters=2), prepare=start)
    assert [record.quantities for record in finished.records] == [{"cluster_sizes": [1, 2]}] * 2
    check("ifca", [(finished.strategy.models[0], FIRST), (finished.strategy.models[1], SECOND)])
