"""FedProto against PFLlib.

Repository TsingZ0/PFLlib, commit d832e76f6a23b833038949ec1e4fdefe63a4d350, not by the authors of the paper. The numbers
come from ``clientProto.train``, ``clientProto.collect_protos`` and ``serverproto.proto_aggregation``, with other data
loading. ``train`` itself collects prototypes during training, as the authors' program does; ``collect_protos`` then
replaces them with the trained network's. PFLlib weighs clients uniformly, so clients have 4 samples of a class here.
"""

from problem import check, config
from program_tools import equalise, numbers

PROTOTYPES = numbers("""
    0.018829238 0.093376562 0 0.45168251 0.24903849 0.07813146 0.42800447 0 0.52108091 0.0026707426 0.057555854
    0.20912328 0 0.46111694 0.15627167
""")
MODEL0 = numbers("""
    -0.26427719 -0.070666008 -0.40757951 0.092645049 0.27939269 0.38385731 -0.13312291 -0.28746331 -0.10119051
    0.091602691 -0.249827 0.14411078 0.36169475 -0.044101991 -0.014164395 0.23806456 0.11190361 0.24478133
    0.0083348555 0.38363758 -0.34446752 0.12287564 -0.405669 0.38723597 -0.064031526 -0.3791109 0.35124168
    0.42887318 -0.22574125 -0.15363766 -0.31560335 -0.031067589 -0.023070224 -0.16674039 -0.18786106 -0.23830757
    -0.41470844 -0.34857848 0.40516391 -0.33626011 0.38133797 0.47058186 0.010939479
""")
MODEL1 = numbers("""
    -0.2691541 -0.064875804 -0.40360382 0.087850109 0.30953968 0.30488274 -0.14507811 -0.33501738 -0.10119051
    0.091602691 -0.249827 0.14411078 0.36423513 -0.036761288 0.035718311 0.25539756 0.10836797 0.2321106
    -0.0066096848 0.3772963 -0.34528199 0.02297597 -0.405669 0.49739611 -0.074208416 -0.38971984 0.34650937
    0.42887318 -0.32248041 -0.18968695 -0.29763746 -0.089900687 -0.023070224 -0.1368532 -0.18225035 -0.24566452
    -0.35114306 -0.34857848 0.47201589 -0.30582154 0.1936461 0.46730706 0.2019062
""")
MODEL2 = numbers("""
    -0.26678517 -0.067390755 -0.40759757 0.092949845 0.27485216 0.3635143 -0.16346394 -0.39525172 -0.10119051
    0.091602691 -0.249827 0.14411078 0.41085625 -0.13751997 -0.058475915 0.26673329 0.095157228 0.24171735
    0.0012636897 0.37668109 -0.3435432 0.070331946 -0.405669 0.46772054 -0.073319614 -0.37950286 0.39768064
    0.42887318 -0.23610969 -0.14915776 -0.3255122 -0.11933106 -0.023070224 -0.26837131 -0.20169953 -0.22800672
    -0.37288395 -0.34857848 0.51716328 -0.32690156 0.39782795 0.27756321 0.1874682
""")


def test_fedproto_agrees_with_pfllib(tmp_path, federate, monkeypatch):
    equalise(monkeypatch)
    finished = federate(config("fedproto", tmp_path))
    pairs = [(finished.strategy.prototypes, PROTOTYPES.reshape(3, 5))]
    pairs += [(finished.kept(client)["model"], model) for client, model in enumerate((MODEL0, MODEL1, MODEL2))]
    check("fedproto", pairs)
    correct = {client: round(8 * share) for client, share in finished.column("served_accuracy")[-1].items()}
    assert correct == {0: 4, 1: 3, 2: 6}  # of 8: clientProto.test_metrics
