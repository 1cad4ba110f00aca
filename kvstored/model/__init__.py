"""Facts of models: namespace specs and costs of what engines cache for them."""
