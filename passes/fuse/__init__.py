"""Fused ops: what each one is (`records`), and the rules that put them in the place of others (`rules`)."""
