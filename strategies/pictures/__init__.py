"""Pictures of individual methods: each method's module has a function ``draw(strategy, folder)``."""
