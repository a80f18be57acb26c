"""The parts that every method of Posy shares: settings, local training, metrics, results."""
