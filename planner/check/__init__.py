"""The check by running: steps of the plain model and of the planned one, from equal state, compared bit for bit."""
