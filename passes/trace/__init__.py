"""A model and its arguments in, the traced joint graph out."""
