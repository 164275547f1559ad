"""The planner inside other tools: as a backend of `torch.compile`."""
