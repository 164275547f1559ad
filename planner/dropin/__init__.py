"""The planned step in place of the model's own forward."""
