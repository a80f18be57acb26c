"""Sample each round's clients using only the settings, so that the server and the clients agree on them."""

from collections import Counter
from functools import lru_cache

from posy.randomness import numpy_generator
from posy.settings import SettingsError
from posy.strategies.run_settings import RunSettings
from posy.strategies.settings import Settings, cohort_size, training_clients


@lru_cache(maxsize=64)
def newcomers_of(settings: Settings) -> tuple[int, ...]:
    """Return, in sorted order, the clients that join only after the last round; the seed determines the draw."""
    run, clients = settings.run, settings.data.num_clients
    if not run.holdout_clients:
        return ()
    count = clients - training_clients(settings)
    if not count:
        raise SettingsError(
            f"holdout-clients = {run.holdout_clients:g} with num-clients = 1: no client would train; set "
            "holdout-clients = 0, or use more clients"
        )
    drawn = numpy_generator(run.seed, "holdout").choice(clients, count, replace=False)
    return tuple(sorted(drawn.tolist()))


@lru_cache(maxsize=64)
def members_of(settings: Settings) -> tuple[int, ...]:
    """Return, in sorted order, the clients from which the cohorts are drawn."""
    return tuple(sorted(set(range(settings.data.num_clients)) - set(newcomers_of(settings))))


def takes_all(run: RunSettings, server_round: int) -> bool:
    """Return whether all clients train in a round, regardless of ``fraction-train``."""
    return run.full_last_round and server_round == run.num_server_rounds


def cohort_of(settings: Settings, server_round: int) -> list[int]:
    """Return, in sorted order, the clients that train in a round; the seed and the round determine the draw."""
    run, members = settings.run, members_of(settings)
    if settings.method.pools_data:
        return list(members[:1])
    size = cohort_size(settings, last_round=takes_all(run, server_round))
    if size == len(members):
        return list(members)
    generator = numpy_generator(run.seed, "cohort", server_round)
    return sorted(generator.choice(members, size, replace=False).tolist())


@lru_cache(maxsize=64)
def most_trainings(settings: Settings) -> int:
    """Return the maximum number of rounds in which any one client trains."""
    rounds = settings.run.num_server_rounds
    if settings.run.fraction_train >= 1:
        return rounds
    counts = Counter(client for number in range(1, rounds + 1) for client in cohort_of(settings, number))
    return max(counts.values())
