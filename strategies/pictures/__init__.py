"""Pictures of single methods: the module of a method has a function ``draw(strategy, folder)``."""
