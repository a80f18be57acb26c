"""LG-FedAvg against its authors' program.

Repository pliang279/LG-FedAvg, commit 7af0568b2cae88922ebeacc021b1679815092f4e: ``main_lg.py`` with one shared layer,
and ``LocalUpdate.train`` in ``models/Update.py``, which fixes momentum 0.5. Data loading and the network were replaced.
"""

from problem import SIZES, check, config

# fmt: off
TOP = [
    -0.38620174, 0.36471835, 0.42788002, -0.27938339, -0.16950448, -0.31351921, -0.068992831, -0.024088174,
    -0.16444443, -0.19135523, -0.23330086, -0.39025986, -0.3465673, 0.45650998, -0.31689909, 0.32298863, 0.43699288,
    0.1028778,
]
# fmt: on
"""The averaged head after two rounds: weight, then bias."""
# fmt: off
LOWER = [
    [
        -0.26457655, -0.069619954, -0.40675482, 0.092830695, 0.28832954, 0.39802063, -0.12602352, -0.29442787,
        -0.10119051, 0.091602691, -0.249827, 0.14411078, 0.37048799, -0.056431953, -0.0044349679, 0.24788763,
        0.1095688, 0.25050032, 0.010112765, 0.38629076, -0.34509969, 0.15202413, -0.405669, 0.36024299, -0.059997652,
    ],
    [
        -0.26201013, -0.068337381, -0.41618302, 0.096715108, 0.31964004, 0.28284311, -0.14504397, -0.36830094,
        -0.11066214, 0.084679477, -0.19850783, 0.11943396, 0.44386926, -0.02755958, -0.00902016, 0.31725827,
        0.10429513, 0.2298919, 0.005880753, 0.37413505, -0.3403711, -0.0036745307, -0.43372285, 0.49085686,
        -0.075443648,
    ],
    [
        -0.27265051, -0.06740839, -0.40852726, 0.093275093, 0.29415655, 0.38938195, -0.13989793, -0.39862776,
        -0.10119051, 0.091602691, -0.249827, 0.14411078, 0.3860248, -0.13754475, -0.081130981, 0.27726501, 0.11917682,
        0.24968368, 0.017795904, 0.38062689, -0.34003273, 0.096956678, -0.405669, 0.4215748, -0.061551634,
    ],
]
# fmt: on
"""Each client's local layer after two rounds: weight, then bias."""


def test_lg_fedavg_matches_the_authors_program(tmp_path, federate):
    settings = {"lg_fedavg_layers": 1, "momentum": 0.5}
    finished = federate(config("lg-fedavg", tmp_path, client_weights="uniform", **settings))
    lower = [finished.kept(client)["personal"] for client in range(len(SIZES))]
    check("lg-fedavg", [(finished.strategy.model, TOP), *zip(lower, LOWER, strict=True)])
