"""Planning a model that several processes train together."""
