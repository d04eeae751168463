"""valueformer: policy evaluation by in-context learning with one frozen, non-linear transformer."""
