"""What runs a planned step. Exports hold copies of `kernels`, `random`, `tensors` and `exported`: torch alone."""
