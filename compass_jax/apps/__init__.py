"""Applications over the core: `plan`, `curate` and `pipeline`. Only commands import them."""
